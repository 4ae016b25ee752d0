"""Rows of tokens or labels as one packed sequence of tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megalight.types import PackedSequences, TokenBatch

IGNORED = -100
"""Label of a token without a loss."""


def masked_sum(losses: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the losses ``[T]`` of the tokens of a mask. Losses behind it belong to padding."""
    weights = mask.reshape(-1)
    return (losses[: weights.numel()] * weights).sum()


def skips(batch: TokenBatch, multiple: int) -> bool:
    """Return whether the last layer and the head skip tokens without a loss.

    They need all tokens of the micro-batch on each rank: numbers of tokens are multiples of 1 then.
    """
    return batch.rows is not None and multiple == 1


def pack(rows: Tensor, sequences: PackedSequences, filler: int) -> Tensor:
    """Flatten rows ``[b, s]``, or packed ``[tokens]``, to ``[T]``, with ``filler`` in the dummy sequence of padding."""
    flat = rows.reshape(-1)
    missing = sequences.num_tokens - len(flat)
    return F.pad(flat, (0, missing), value=filler) if missing else flat
