"""An independent GPT for parity tests: plain torch, batch-shaped ``[B, S, h]``, one head at a time, nothing shared.

Parameters come as a dict of canonical names (``layers.0.attention.q.weight``, ``layers.0.mlp.gate.weight``, ...), so
that a test may take gradients with respect to them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Params = dict[str, Tensor]


def canonical_params(model: torch.nn.Module, dtype: torch.dtype = torch.float64) -> Params:
    """Leaf copies of a one-device model's parameters by canonical name, with ``requires_grad``."""
    from megalight.nn.canonical import parts

    found = {}
    own = dict(model.named_parameters())
    for part in parts(model):
        flat = own[part.parameter].detach().reshape(-1)
        piece = flat[part.start : part.start + math.prod(part.shape)].reshape(part.shape)
        found[part.name] = piece.to(dtype, copy=True).requires_grad_()
    return found


def canonical_gradients(model: torch.nn.Module) -> Params:
    """A one-device model's gradients by canonical name."""
    from megalight.nn.canonical import parts

    own = dict(model.named_parameters())
    return {
        part.name: own[part.parameter]
        .grad.reshape(-1)[part.start : part.start + math.prod(part.shape)]
        .view(part.shape)
        for part in parts(model)
    }


def _norm(params: Params, name: str, x: Tensor, config) -> Tensor:
    if config.norm.kind == "rms":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm.eps) * params[f"{name}.weight"]
    centered = x - x.mean(-1, keepdim=True)
    scaled = centered / torch.sqrt((centered * centered).mean(-1, keepdim=True) + config.norm.eps)
    return scaled * params[f"{name}.weight"] + params[f"{name}.bias"]


def _linear(params: Params, name: str, x: Tensor) -> Tensor:
    y = torch.einsum("bsi,oi->bso", x, params[f"{name}.weight"])
    return y + params[f"{name}.bias"] if f"{name}.bias" in params else y


def _act(kind: str, x: Tensor) -> Tensor:
    match kind:
        case "silu":
            return x / (1 + torch.exp(-x))
        case "gelu":
            return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        case "gelu_tanh":
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "quick_gelu":
            return x / (1 + torch.exp(-1.702 * x))
        case "relu":
            return x * (x > 0)
        case "squared_relu":
            return (x * (x > 0)) ** 2
    raise AssertionError(kind)


def _mlp(params: Params, name: str, x: Tensor, config) -> Tensor:
    gates = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
    if config.activation in gates:
        wide = _act(gates[config.activation], _linear(params, f"{name}.gate", x)) * _linear(params, f"{name}.up", x)
    else:
        wide = _act(config.activation, _linear(params, f"{name}.up", x))
    return _linear(params, f"{name}.down", wide)


def _rotate(x: Tensor, config) -> Tensor:
    """``x [B, S, D]``: feature pairs as complex numbers times ``exp(i position frequency)``."""
    dim = config.rotary_dim
    frequency = config.position.base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)
    first, second = (
        (slice(0, dim, 2), slice(1, dim, 2))
        if config.position.interleaved
        else (
            slice(0, dim // 2),
            slice(dim // 2, dim),
        )
    )
    turned = torch.complex(x[..., first], x[..., second]) * turn
    out = x.clone()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def _attention(params: Params, name: str, x: Tensor, config, layer: int) -> Tensor:
    length, dim = x.shape[1], config.head_dim
    q, k, v = (_linear(params, f"{name}.{part}", x) for part in "qkv")
    rows = torch.arange(length)
    distance = rows[:, None] - rows
    visible = distance >= 0
    window = config.attention.window_of(layer)
    if window is not None:
        visible = visible & (distance <= window)
    contexts = []
    for head in range(config.num_heads):
        kv = head * config.num_kv_heads // config.num_heads
        query, key = q[..., head * dim : (head + 1) * dim], k[..., kv * dim : (kv + 1) * dim]
        if config.attention.qk_norm:
            query, key = _norm(params, f"{name}.q_norm", query, config), _norm(params, f"{name}.k_norm", key, config)
        if config.position.rotates(layer):
            query, key = _rotate(query, config), _rotate(key, config)
        tuned = config.attention.temperature
        if tuned is not None and not config.position.rotates(layer):
            query = query * (1 + tuned.scale * torch.log1p(((rows + 1) // tuned.length).double()))[:, None]
        scores = query @ key.transpose(1, 2) * (config.attention.scale or 1 / math.sqrt(dim))
        if config.attention.softcap is not None:
            scores = torch.tanh(scores / config.attention.softcap) * config.attention.softcap
        weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * visible
        contexts.append(weights / weights.sum(-1, keepdim=True) @ v[..., kv * dim : (kv + 1) * dim])
    mixed = torch.cat(contexts, -1)
    if config.attention.output_gate:
        mixed = mixed / (1 + torch.exp(-_linear(params, f"{name}.gate", x)))
    return _linear(params, f"{name}.proj", mixed)


def reference_logits(params: Params, config, tokens: Tensor) -> Tensor:
    """``[B, S] -> [B, S, V]``: every row is one sequence; no dropout."""
    return _logits(params, config, _hidden(params, config, tokens))


def _embedded(params: Params, config, tokens: Tensor, first: int = 0) -> Tensor:
    x = params["embed.word.weight"][tokens] * config.embedding_multiplier
    if config.position.kind == "learned":
        x = x + params["embed.position.weight"][first : first + tokens.shape[1]]
    return x


def _layer(params: Params, name: str, x: Tensor, config, index: int) -> Tensor:
    # layers of a pattern have one of the two
    if f"{name}.attention_norm.weight" in params:
        normed = _norm(params, f"{name}.attention_norm", x, config)
        x = x + _attention(params, f"{name}.attention", normed, config, index)
    if f"{name}.mlp_norm.weight" in params:
        x = x + _mlp(params, f"{name}.mlp", _norm(params, f"{name}.mlp_norm", x, config), config)
    return x


def _hidden(params: Params, config, tokens: Tensor) -> Tensor:
    """The output of the final norm."""
    x = _embedded(params, config, tokens)
    for i in range(config.num_layers):
        x = _layer(params, f"layers.{i}", x, config, i)
    return _norm(params, "head.norm", x, config)


def _logits(params: Params, config, normed: Tensor) -> Tensor:
    weight = params["embed.word.weight" if config.tie_embeddings else "head.output_layer.weight"]
    logits = normed @ weight.T
    return logits if config.logit_softcap is None else config.logit_softcap * torch.tanh(logits / config.logit_softcap)


def reference_losses(params: Params, config, tokens: Tensor, labels: Tensor) -> Tensor:
    """``[B, S], [B, S] -> [B, S]``: minus the log-probability of each label."""
    logits = reference_logits(params, config, tokens)
    return torch.logsumexp(logits, -1) - logits.gather(-1, labels[..., None])[..., 0]


def reference_depths(params: Params, config, tokens: Tensor, labels: Tensor) -> list[Tensor]:
    """Losses of each depth of multi-token prediction in one sequence ``[S]``; depth k has ``S - k`` of them."""
    x, found = _hidden(params, config, tokens[None]), []
    for depth in range(1, config.mtp.num_layers + 1):
        name = f"mtp.depths.{depth - 1}"
        # without the last token of the depth before, which has no token so much later
        e = _norm(params, f"{name}.embed_norm", _embedded(params, config, tokens[None, depth:], depth), config)
        h = _norm(params, f"{name}.hidden_norm", x[:, : e.shape[1]], config)
        x = _linear(params, f"{name}.join", torch.cat([e, h], -1))
        if x.numel():
            # further layers, or one like the last
            for place in range(len(config.mtp.pattern) or 1):
                index = config.num_layers + (place if config.mtp.pattern else -1)
                x = _layer(params, f"{name}.layers.{place}", x, config, index)
        x = _norm(params, f"{name}.norm", x, config)
        logits = _logits(params, config, x)[0]
        found.append(torch.logsumexp(logits, -1) - logits.gather(-1, labels[depth:, None])[:, 0])
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    """``|found - expected| / |expected|`` in the 2-norm, in float64."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))
