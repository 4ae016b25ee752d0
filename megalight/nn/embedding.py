"""Embeddings: from token ids to hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalight.nn.init import Initializer, Normal
from megalight.ops.embedding import embedding


class Embedding(nn.Module):
    """A lookup table with one row of ``weight`` per id.

    Attributes:
        weight: ``[num, h]``, initially normal with standard deviation ``std``.
    """

    def __init__(self, num: int, hidden_size: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, hidden_size))
        self.initializers: dict[str, Initializer] = {"weight": Normal(std)}

    def forward(self, ids: Tensor) -> Tensor:
        """``[T] -> [T, h]``."""
        return embedding(ids, self.weight)

    def extra_repr(self) -> str:
        """Return rows and width, for printing."""
        return f"{self.weight.shape[0]} -> {self.weight.shape[1]}"


class TokenEmbedding(nn.Module):
    """Sum of the scaled word embedding and optional embeddings of position and token type; then norm and dropout.

    Args:
        word: rows by token id.
        position: rows by position in the sequence, or None.
        token_type: rows by type (in BERT, the first or the second sentence), or None.
        norm: applied to the sum, or None.
        multiplier: factor of the word embedding (``sqrt(h)`` in Gemma).
        dropout: dropout probability.
    """

    def __init__(
        self,
        word: Embedding,
        position: Embedding | None = None,
        token_type: Embedding | None = None,
        norm: nn.Module | None = None,
        *,
        multiplier: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.word = word
        self.position = position
        self.token_type = token_type
        self.norm = norm
        self.multiplier = multiplier
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """``tokens [T], positions [T], token_types [T]`` (None: all 0) ``-> [T, h]``."""
        hidden: Tensor = self.word(tokens)
        # skip a multiplication by 1, which would cost a pass over memory
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        if self.position is not None:
            hidden = hidden + self.position(positions)
        if self.token_type is not None:
            # Type 0 for all tokens, as in text of one part: its row is added all the same, since it is trained.
            hidden = hidden + self.token_type(torch.zeros_like(tokens) if token_types is None else token_types)
        # The norm is over the sum of all embeddings.
        if self.norm is not None:
            hidden = self.norm(hidden)
        dropped: Tensor = self.dropout(hidden)
        return dropped
