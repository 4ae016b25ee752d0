"""Parameters and floating-point operations of a GPT, from its configuration alone."""

from __future__ import annotations

from megalight.models.gpt.config import GPTConfig
from megalight.nn.mlp import is_gated


def _norm_parameters(config: GPTConfig, size: int) -> int:
    return size * (2 if config.norm.kind == "layer" else 1)


def _layer_matmul_parameters(config: GPTConfig) -> int:
    """Weights of one layer's projections."""
    qkv_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = config.hidden_size * (qkv_size + config.num_heads * config.head_dim)
    mlp = config.hidden_size * config.ffn_hidden_size * (3 if is_gated(config.activation) else 2)
    return attention + mlp


def _layer_vector_parameters(config: GPTConfig) -> int:
    """Norm weights and biases of one layer."""
    norms = 2 * _norm_parameters(config, config.hidden_size)
    if config.attention.qk_norm:
        norms += 2 * _norm_parameters(config, config.head_dim)
    biases = 0
    if config.attention.qkv_bias:
        biases += (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    if config.attention.proj_bias:
        biases += config.hidden_size
    if config.mlp_bias:
        biases += config.ffn_hidden_size * (2 if is_gated(config.activation) else 1) + config.hidden_size
    return norms + biases


def num_parameters(config: GPTConfig) -> int:
    """All parameters; a tied weight counts once."""
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    if config.position.kind == "learned":
        tables += config.max_sequence_length * config.hidden_size
    layer = _layer_matmul_parameters(config) + _layer_vector_parameters(config)
    return tables + config.num_layers * layer + _norm_parameters(config, config.hidden_size)


def flops_per_token(config: GPTConfig, sequence_length: int) -> float:
    """Floating-point operations of forward and backward, per token, in sequences of ``sequence_length`` tokens.

    Six per weight of the projections and the head (the embedding is a look-up), and for attention twelve per query
    feature and visible key: half of the sequence on average under the causal mask, less under a window. Recomputation
    is not counted.
    """
    matmul = config.num_layers * _layer_matmul_parameters(config) + config.vocab_size * config.hidden_size
    keys = sum(_mean_visible_keys(sequence_length, config.attention.window_of(i)) for i in range(config.num_layers))
    return 6.0 * matmul + 12.0 * config.num_heads * config.head_dim * keys


def _mean_visible_keys(length: int, window: int | None) -> float:
    """Keys that a causal query sees, averaged over the sequence, to leading order."""
    if window is None or window >= length:
        return length / 2
    return window - window**2 / (2 * length)
