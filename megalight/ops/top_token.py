"""The most likely token of a linear layer, a chunk of tokens at a time, so that only few logits exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from megalight.ops.cross_entropy.chunked import SHARE, cut, memory_of
from megalight.ops.cross_entropy.products import logits_of

Choose: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Largest logits ``[T]`` of each rank, and their rows ``[T]`` -> the rows of the largest of all ranks."""


@torch.no_grad()
def top_token(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    first_row: int = 0,
    num_rows: int | None = None,
    choose: Choose | None = None,
) -> Tensor:
    """Return the row of ``weight`` with the largest logit for each token, the first of equal ones: ``[T]`` int64.

    A soft cap keeps the order of logits, so it is not needed here.

    Args:
        hidden: ``[T, h]``.
        weight: ``[V, h]``: rows ``first_row`` to ``first_row + V`` of the vocabulary.
        bias: ``[V]``.
        first_row, num_rows: as in :func:`megalight.ops.cross_entropy.linear_cross_entropy`.
        choose: for a weight that is divided over ranks.
    """
    size = weight.shape[0]
    real = max(0, min(size, (first_row + size if num_rows is None else num_rows) - first_row))
    largest = torch.full(hidden.shape[:1], -torch.inf, dtype=hidden.dtype, device=hidden.device)
    rows = torch.zeros_like(largest, dtype=torch.int64)
    chunk, _ = cut(len(hidden), size * hidden.element_size(), None, memory_of(hidden.device) * SHARE)
    # A rank may hold padding only; its largest logit stays minus infinity.
    for start in range(0, len(hidden) if real else 0, chunk):
        part = slice(start, start + chunk)
        largest[part], rows[part] = logits_of(hidden[part], weight, bias)[:, :real].max(-1)
    rows += first_row
    return rows if choose is None else choose(largest, rows)
