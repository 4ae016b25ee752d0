"""Numbers of parameters and floating-point operations of a BERT, computed from its configuration."""

from __future__ import annotations

from megalight.models.bert.config import BertConfig

MASKED = 0.15
"""Fraction of the tokens that the masked-LM head processes."""


def _layer_matmul_parameters(config: BertConfig) -> int:
    """Return the number of weights in the projections of one layer."""
    return config.hidden_size * (4 * config.hidden_size + 2 * config.ffn_hidden_size)


def num_parameters(config: BertConfig) -> int:
    """Return the number of all parameters. A tied weight counts once."""
    h, norm = config.hidden_size, 2 * config.hidden_size
    rows = config.vocab_size + config.max_sequence_length + config.num_token_types
    # Biases of attention and MLP are the term in brackets.
    layer = _layer_matmul_parameters(config) + (4 * h + config.ffn_hidden_size + h) + 2 * norm
    dense = (h + 1) * h
    if config.head != "pretraining":
        return rows * h + norm + config.num_layers * layer + (dense if config.head == "pooler" else 0)
    head = dense + norm + config.vocab_size * (1 if config.tie_embeddings else h + 1)
    order = dense + 2 * (h + 1) if config.sentence_order else 0
    return rows * h + norm + config.num_layers * layer + head + order


def flops_per_token(config: BertConfig, sequence_length: int) -> float:
    """Return floating-point operations of forward and backward per token, in sequences of ``sequence_length`` tokens.

    Each weight of the projections counts six operations. Weights of the masked-LM head count six for each masked token.
    Attention counts twelve for each query feature and key, as every token sees its whole sequence. Not counted:
    embeddings (look-ups), the head that reads only first tokens, and recomputation.
    """
    h = config.hidden_size
    # Only masked tokens pass the head. They are chosen before it.
    head = MASKED * (h * h + config.vocab_size * h) if config.head == "pretraining" else 0.0
    matmul = config.num_layers * _layer_matmul_parameters(config) + head
    return 6.0 * matmul + 12.0 * config.num_layers * h * sequence_length
