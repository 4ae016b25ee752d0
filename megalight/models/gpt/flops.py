"""Numbers of parameters and floating-point operations of a GPT, computed from its configuration."""

from __future__ import annotations

from megalight.models.gpt.config import GPTConfig
from megalight.nn.mlp import is_gated


def _norm_parameters(config: GPTConfig, size: int) -> int:
    return size * (2 if config.norm.kind == "layer" else 1)


def _matmul_parameters(config: GPTConfig, active: bool) -> int:
    """Return the number of weights in the projections and convolutions of all layers.

    Args:
        active: count only the experts that one token passes through.
    """
    h = config.hidden_size
    # Grouped heads share keys and values.
    qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    outputs = (2 if config.attention.output_gate else 1) * config.num_heads * config.head_dim
    attention = h * (qkv_size + outputs)
    # A convolution has three projections in and one out, each `h x h`.
    mixers = {"attention": attention, "conv": h * (4 * h + config.conv_kernel), None: 0}
    if (mamba := config.mamba) is not None:
        mixers["mamba"] = h * (2 * mamba.inner_size + mamba.conv_size + mamba.num_heads)
        mixers["mamba"] += mamba.conv_size * mamba.conv_kernel
    if (delta := config.delta) is not None:
        mixers["gated_delta_net"] = h * (2 * delta.inner_size + delta.conv_size + 2 * delta.num_heads)
        mixers["gated_delta_net"] += delta.conv_size * delta.conv_kernel
    if (latent := config.latent) is not None:
        queries = config.num_heads * config.head_dim
        mixers["latent_attention"] = (
            # Down and up, as two products. The absorbed form of generation is not training.
            (h * queries if latent.q_rank is None else latent.q_rank * (h + queries))
            + h * (latent.kv_rank + latent.rotary_dim)
            + latent.kv_rank * config.num_heads * (latent.head_dim + latent.value_dim)
            + config.num_heads * latent.value_dim * h
        )
    projections = 3 if is_gated(config.activation) else 2
    dense, experts = projections * h * config.ffn_hidden_size, 0
    if (moe := config.moe) is not None:
        width = config.expert_ffn_hidden_size * (moe.router.top_k if active else moe.num_experts)
        # The router's weight, for which every token pays.
        experts = h * moe.num_experts
        if moe.shared is not None:
            width += moe.shared.ffn_hidden_size
            experts += h if moe.shared.gate else 0
        experts += projections * h * width
    layers = _layers(config)
    feed_forward = [0 if not config.has_mlp(i) else experts if config.has_experts(i) else dense for i in layers]
    joins = config.num_depths * 2 * h * h
    return joins + sum(feed_forward) + sum(mixers[config.mixer_of(i)] for i in layers)


def _vector_parameters(config: GPTConfig, active: bool) -> int:
    """Return the number of norm weights and biases in all layers."""
    attention = 0
    if config.attention.qk_norm:
        heads = config.num_heads + config.num_kv_heads if config.attention.qk_norm_whole else 2
        attention += _norm_parameters(config, config.head_dim * heads)
    if config.attention.qkv_bias:
        queries = (2 if config.attention.output_gate else 1) * config.num_heads
        attention += (queries + 2 * config.num_kv_heads) * config.head_dim
    if config.attention.proj_bias:
        attention += config.hidden_size
    if config.attention.softmax == "learnable":
        attention += config.num_heads
    if config.latent is not None:
        attention = (config.latent.q_rank or 0) + config.latent.kv_rank  # norms of the latents
    wide = 2 if is_gated(config.activation) else 1
    mlp = config.ffn_hidden_size * wide + config.hidden_size if config.mlp_bias else 0
    experts = 0
    if (moe := config.moe) is not None:
        each = config.expert_ffn_hidden_size * wide + config.hidden_size if moe.bias else 0
        experts = (moe.router.top_k if active else moe.num_experts) * each
        experts += moe.num_experts if moe.router.bias else 0
    indices = _layers(config)
    layers = sum(experts if config.has_experts(layer) else mlp for layer in filter(config.has_mlp, indices))
    if (mamba := config.mamba) is not None:
        each = 3 * mamba.num_heads + mamba.inner_size + (mamba.conv_size if mamba.conv_bias else 0)
        layers += len(_layers_with(config, "mamba")) * each
    if (delta := config.delta) is not None:
        layers += len(_layers_with(config, "gated_delta_net")) * (2 * delta.num_heads + delta.head_dim)
    norms = sum((config.mixer_of(layer) is not None) + config.has_mlp(layer) for layer in indices)
    norms *= 2 if config.norm.after else 1
    # A depth of multi-token prediction norms both of its inputs and its output.
    norms += 3 * config.num_depths
    return norms * _norm_parameters(config, config.hidden_size) + layers + len(_attention_layers(config)) * attention


def _layers(config: GPTConfig) -> list[int]:
    """Return the index of each layer, those of multi-token prediction included."""
    return [*range(config.num_layers), *config.depth_layers * config.num_depths]


def _attention_layers(config: GPTConfig) -> list[int]:
    return [layer for layer in _layers(config) if "attention" in (config.mixer_of(layer) or "")]


def _layers_with(config: GPTConfig, mixer: str) -> list[int]:
    return [layer for layer in _layers(config) if config.mixer_of(layer) == mixer]


def num_parameters(config: GPTConfig, *, active: bool = False) -> int:
    """Return the number of all parameters. A tied weight counts once.

    Args:
        active: count only the experts that one token passes through.
    """
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    if config.position.kind == "learned":
        tables += config.max_sequence_length * config.hidden_size
    layers = _matmul_parameters(config, active) + _vector_parameters(config, active)
    return tables + layers + _norm_parameters(config, config.hidden_size)


def flops_per_token(config: GPTConfig, sequence_length: int, trained: float | None = 1.0) -> float:
    """Return floating-point operations of forward and backward per token, in sequences of ``sequence_length`` tokens.

    Each weight of projections, convolutions and the head counts six operations; of the experts, only those that a
    token passes through. Attention counts six for each query feature, each value feature and visible key:
    with a causal mask, half of the sequence on average; with a window, less. The scan of Mamba-2 and the rule of Gated
    DeltaNet count as their chunked products; see :func:`_scan_products` and :func:`_delta_products`. Each depth of
    multi-token prediction counts its projection, its layers and the head a second time. Not counted: the embedding (a
    look-up) and recomputation.

    Args:
        config: the model.
        sequence_length: tokens of a sequence.
        trained: the share of the weights whose gradients are computed, two operations of the six; those of inputs are
            computed of all. None: there is no backward pass.
    """
    heads = 1 + config.num_depths
    matmul = _matmul_parameters(config, True) + heads * config.vocab_size * config.hidden_size
    limits = [(config.attention.window_of(i), config.attention.chunk_of(i)) for i in _attention_layers(config)]
    # Each chunk is a sequence of its own.
    keys = sum(_mean_visible_keys(min(sequence_length, chunk or sequence_length), window) for window, chunk in limits)
    value_dim = config.head_dim if config.latent is None else config.latent.value_dim
    scans = len(_layers_with(config, "mamba")) * _scan_products(config)
    scans += len(_layers_with(config, "gated_delta_net")) * _delta_products(config)
    # Six for each: two operations for each multiply-add, once forward and twice backward. Scores use the width
    # of keys, and outputs that of values.
    products = scans + config.num_heads * (config.head_dim + value_dim) * keys
    if trained is None:
        return 2.0 * (matmul + products)
    return (4.0 + 2.0 * trained) * matmul + 6.0 * products


def weights_of_losses(config: GPTConfig, whole_layer: bool = False) -> int:
    """Return how many weights only tokens with a loss need, if a model skips the others behind its last mixer.

    These are the head, and in the last layer the MLP and the projection behind attention. A last layer with experts
    computes all tokens.

    Args:
        config: the model.
        whole_layer: whether the last layer computes all tokens in any case.
    """
    last = config.num_layers - 1
    weights = config.vocab_size * config.hidden_size
    narrows = config.mixer_of(last) is not None and config.has_mlp(last) and not config.has_experts(last)
    if narrows and not whole_layer:
        weights += (3 if is_gated(config.activation) else 2) * config.hidden_size * config.ffn_hidden_size
        if config.mixer_of(last) == "attention":
            weights += config.hidden_size * config.num_heads * config.head_dim
    return weights


SCAN_CHUNK = 128
"""Tokens per chunk in the count of the scan's products, whatever a kernel's chunks are."""


def _scan_products(config: GPTConfig) -> float:
    """Return multiplications per token of the scan in chunks (https://arxiv.org/abs/2405.21060, section 6).

    Within a chunk, a token meets half of the chunk's tokens on average: products of ``b`` and ``c`` in each group, and
    of the result with ``x`` in each head. Between chunks, each head's token is added to its state, and reads it.
    """
    mamba = config.mamba
    if mamba is None:
        return 0.0
    within = SCAN_CHUNK / 2 * (mamba.num_groups * mamba.state_size + mamba.inner_size)
    return within + 2 * mamba.inner_size * mamba.state_size


def _delta_products(config: GPTConfig) -> float:
    """Return multiplications per token of the delta rule in chunks (https://arxiv.org/abs/2412.06464, section 3.3).

    Within a chunk, a token meets half of the chunk's tokens on average: products of keys with keys and with queries, of
    the solved system with values and keys, and of scores with what was written. Between chunks, each head's token
    reads its state twice and is added to it.
    """
    delta = config.delta
    if delta is None:
        return 0.0
    within = 2 * delta.num_key_heads * delta.key_dim + 2 * delta.inner_size + delta.num_heads * delta.key_dim
    return SCAN_CHUNK / 2 * within + 3 * delta.inner_size * delta.key_dim


def _mean_visible_keys(length: int, window: int | None) -> float:
    """Return how many keys a causal query sees, averaged over the sequence, to leading order."""
    if window is None or window >= length:
        return length / 2
    return window - window**2 / (2 * length)
