"""Plain versions of the ops that the layers call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.types import PackedSequences


def rms_norm(x: Tensor, weight: Tensor, eps: float, backend: str = "auto") -> Tensor:
    """RMS norm over the last dim."""
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, backend: str = "auto") -> Tensor:
    """Layer norm over the last dim."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rotary_table(positions: Tensor, dim: int, base: float, scaling: object = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, dim / 2]``."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    angles = positions.double()[:, None] * base**-exponents
    dtype = torch.float64 if positions.dtype == torch.float64 else torch.float32
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, backend: str = "auto") -> Tensor:
    """Rotate the first features of each head."""
    half = cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = a * cos - b * sin, a * sin + b * cos
    out = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([out, rest], -1)


def activation(x: Tensor, kind: str) -> Tensor:
    """Elementwise function."""
    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": F.relu,
        "squared_relu": lambda x: F.relu(x).square(),
    }
    return functions[kind](x)


def gated(x: Tensor, kind: str = "silu", backend: str = "auto") -> Tensor:
    """``f(gate) * up``."""
    gate, up = x.chunk(2, -1)
    return activation(gate, kind) * up


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Attention sequence by sequence."""
    keys = sequences.keys or sequences
    outputs = []
    for query, key, value in zip(
        q.split(list(sequences.lengths)), k.split(list(keys.lengths)), v.split(list(keys.lengths)), strict=True
    ):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.shape[-1] ** -0.5)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if causal:
            lag = torch.arange(len(query), device=q.device)[:, None] + len(key) - len(query)
            lag = lag - torch.arange(len(key), device=q.device)
            hidden = lag < 0 if window is None else (lag < 0) | (lag > window)
            scores = scores.masked_fill(hidden, -torch.inf)
        weights = F.dropout(scores.softmax(-1), dropout)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(outputs)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Losses ``[T]``."""
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(
        logits.double() if logits.dtype == torch.float64 else logits.float(), labels, reduction="none"
    )
