"""Sums of terms in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_terms(out: Tensor, own: Tensor, others: Sequence[Tensor], place: int, add: bool) -> None:
    """Implement :func:`megalight.ops.sum_terms.sum_terms`."""
    terms = [*others[:place], own, *others[place:]]
    total = terms[0].to(torch.promote_types(own.dtype, torch.float32), copy=True)
    for term in terms[1:]:
        total += term
    if add:
        out.add_(total)
    else:
        out.copy_(total)
