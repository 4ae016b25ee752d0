"""Pooling: one vector per sequence, from its first token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalight.nn.linear import Linear
from megalight.types import PackedSequences


class Pooler(nn.Module):
    """``tanh(dense(x))`` of the first token of each sequence (BERT, https://arxiv.org/abs/1810.04805).

    Args:
        dense: ``h -> h``.
    """

    def __init__(self, dense: Linear) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, hidden: Tensor, sequences: PackedSequences) -> Tensor:
        """``[T, h] -> [n, h]``: one row for each of the ``n`` sequences, also for sequences of padding."""
        # `cu_seqlens[:-1]` are the places of the first tokens.
        # Chosen before `dense`: it then multiplies a row for each sequence instead of each token.
        return torch.tanh(self.dense(hidden.index_select(0, sequences.cu_seqlens[:-1])))


class SequenceHead(nn.Module):
    """Classification of whole sequences.

    Args:
        pooler: gives one row per sequence.
        output: ``h -> classes``.
    """

    def __init__(self, pooler: Pooler, output: Linear) -> None:
        super().__init__()
        self.pooler = pooler
        self.output = output

    def forward(self, hidden: Tensor, sequences: PackedSequences) -> Tensor:
        """``[T, h] -> [n, classes]`` logits."""
        logits: Tensor = self.output(self.pooler(hidden, sequences))
        return logits
