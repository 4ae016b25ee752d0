"""From token ids to hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.nn.init import Initializer, Normal


class Embedding(nn.Module):
    """One row of ``weight`` per id.

    Attributes:
        weight: ``[num, h]``, drawn with standard deviation ``std``.
    """

    def __init__(self, num: int, hidden_size: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, hidden_size))
        self.initializers: dict[str, Initializer] = {"weight": Normal(std)}

    def forward(self, ids: Tensor) -> Tensor:
        """``[T] -> [T, h]``."""
        return F.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        """Rows and width, for printing."""
        return f"{self.weight.shape[0]} -> {self.weight.shape[1]}"


class TokenEmbedding(nn.Module):
    """Word embedding, times a constant, plus a learned position embedding where there is one, then dropout.

    Args:
        word: rows by token id.
        position: rows by position in the sequence, or None.
        multiplier: scales the word embedding (``sqrt(h)`` in Gemma).
        dropout: probability.
    """

    def __init__(
        self, word: Embedding, position: Embedding | None = None, *, multiplier: float = 1.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.word = word
        self.position = position
        self.multiplier = multiplier
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """``tokens [T], positions [T] -> [T, h]``."""
        hidden: Tensor = self.word(tokens)
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        if self.position is not None:
            hidden = hidden + self.position(positions)
        dropped: Tensor = self.dropout(hidden)
        return dropped
