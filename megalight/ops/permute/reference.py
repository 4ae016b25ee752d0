"""Token permutation by expert in plain torch: where each row goes, the copy there, and the sum back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalight.ops.common import wide

# Where rows of tokens stand when they are grouped by expert.


@dataclass(frozen=True, eq=False)
class Permutation:
    """The row of each pair of a token and one of its experts, in an order grouped by expert.

    All tensors are on the device, so that the host need not know how many tokens an expert has. Groups follow each
    other in the order of the experts, and within a group rows are in the order of the tokens.

    Attributes:
        positions: ``[T, k]`` int32, the row of each pair; -1: the pair has no row.
        sizes: ``[E]`` int32, the number of tokens of each expert.
        offsets: ``[E]`` int32, the end of each group. A group is padded with rows of zeros up to its end.
        rows: ``R``, the number of rows of grouped tensors. Rows after the last group are zeros too.
    """

    positions: Tensor
    sizes: Tensor
    offsets: Tensor
    rows: int


def most_rows(pairs: int, num_experts: int, alignment: int) -> int:
    """Return how many rows ``pairs`` can need at most if the size of every group is a multiple of ``alignment``."""
    # At most min(pairs, E) groups are not empty, and each is padded by at most alignment - 1 rows.
    return (pairs + min(pairs, num_experts) * (alignment - 1)) // alignment * alignment


def permutation(experts: Tensor, num_experts: int, alignment: int, capacity: int | None, rows: int) -> Permutation:
    """Implement :func:`megalight.ops.permute.permutation`."""
    flat = experts.flatten().long()
    here = (flat >= 0) & (flat < num_experts)
    # `[T k, E]`. Pairs without a row equal no expert. (`one_hot` would read values on the host.)
    chosen = (flat.unsqueeze(1) == torch.arange(num_experts, device=flat.device)).long()
    sizes = chosen.sum(0)
    if capacity is not None:
        sizes = sizes.clamp(max=capacity)
        padded = torch.full_like(sizes, capacity)
    else:
        padded = (sizes + alignment - 1) // alignment * alignment
    offsets = padded.cumsum(0)
    expert = torch.where(here, flat, 0)
    # The number of earlier pairs with the same expert: rows of a group are in the order of the tokens.
    place = (chosen.cumsum(0) - chosen).gather(1, expert.unsqueeze(1)).squeeze(1)
    position = (offsets - padded)[expert] + place
    kept = here & (place < sizes[expert]) & (position < rows)
    positions = torch.where(kept, position, -1).view_as(experts)
    return Permutation(positions.int(), sizes.int(), offsets.clamp(max=rows).int(), rows)


def _targets(where: Permutation) -> Tensor:
    """Return the row of each pair, ``[T k]``; pairs without a row point to an extra one at the end."""
    flat = where.positions.flatten().long()
    return torch.where(flat < 0, where.rows, flat)


def permute(x: Tensor, where: Permutation, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Implement :func:`megalight.ops.permute.permute`."""
    target = _targets(where)
    copies = x.repeat_interleave(where.positions.shape[1], 0)
    # The extra row takes the pairs without a row: an index for them, without a branch or a dynamic shape.
    rows = x.new_zeros(where.rows + 1, x.shape[1]).index_copy(0, target, copies)[:-1]
    if probs is None:
        return rows, None
    return rows, probs.new_zeros(where.rows + 1).index_copy(0, target, probs.flatten())[:-1]


def unpermute(rows: Tensor, where: Permutation, probs: Tensor | None) -> Tensor:
    """Implement :func:`megalight.ops.permute.unpermute`."""
    if not where.rows:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 1))  # something to index, and the graph goes on
    positions = where.positions.long()
    picked = rows.to(wide(rows.dtype))[positions.clamp(min=0)]
    # rows that belong to no token may hold anything, even NaN: they are left out, not multiplied by zero
    picked = torch.where((positions >= 0).unsqueeze(-1), picked, 0)
    if probs is not None:
        picked = picked * probs.to(picked.dtype).unsqueeze(-1)
    return picked.sum(1).to(rows.dtype)
