"""Rows of tokens or labels as one packed sequence of tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megalight.types import PackedSequences

IGNORED = -100
"""Label of a token without a loss."""


def masked_sum(losses: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the losses ``[T]`` of the tokens of a mask. Losses behind it belong to padding."""
    weights = mask.reshape(-1)
    return (losses[: weights.numel()] * weights).sum()


def pack(rows: Tensor, sequences: PackedSequences, filler: int) -> Tensor:
    """Flatten rows ``[b, s]``, or packed ``[tokens]``, to ``[T]``, with ``filler`` in the dummy sequence of padding."""
    flat = rows.reshape(-1)
    missing = sequences.num_tokens - len(flat)
    return F.pad(flat, (0, missing), value=filler) if missing else flat
