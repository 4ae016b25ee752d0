"""Bring tokens into groups by expert, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.batch_invariant import MODE, rowwise
from megalight.ops.common import lazy, serve_all, triton_why_not, wide
from megalight.registry import Backend, BackendRegistry, choose


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


def reference_permutation(
    experts: Tensor, num_experts: int, alignment: int, capacity: int | None, rows: int
) -> Permutation:
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


def reference_permute(x: Tensor, where: Permutation, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Implement :func:`megalight.ops.permute.permute`."""
    target = _targets(where)
    copies = x.repeat_interleave(where.positions.shape[1], 0)
    # The extra row takes the pairs without a row: an index for them, without a branch or a dynamic shape.
    rows = x.new_zeros(where.rows + 1, x.shape[1]).index_copy(0, target, copies)[:-1]
    if probs is None:
        return rows, None
    return rows, probs.new_zeros(where.rows + 1).index_copy(0, target, probs.flatten())[:-1]


def reference_unpermute(rows: Tensor, where: Permutation, probs: Tensor | None) -> Tensor:
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


class PermuteSpec(NamedTuple):
    """A request: device type, dtype of the rows, dtype of the probabilities, number of experts."""

    device: str
    dtype: torch.dtype
    probs_dtype: torch.dtype
    num_experts: int


PERMUTATION: BackendRegistry[PermuteSpec, Callable[..., Permutation]] = BackendRegistry("permutation")
PERMUTE: BackendRegistry[PermuteSpec, Callable[..., tuple[Tensor, Tensor | None]]] = BackendRegistry("permute")
UNPERMUTE: BackendRegistry[PermuteSpec, Callable[..., Tensor]] = BackendRegistry("unpermute")
REGISTRIES: tuple[BackendRegistry[PermuteSpec, Any], ...] = (PERMUTATION, PERMUTE, UNPERMUTE)
MOST_EXPERTS = 1024
EXAMPLE = PermuteSpec("cpu", torch.bfloat16, torch.float32, 128)


def _triton_why_not(spec: PermuteSpec) -> str | None:
    if spec.num_experts > MOST_EXPERTS:
        return f"serves at most {MOST_EXPERTS} experts, not {spec.num_experts}"
    return triton_why_not(spec.device, spec.dtype, spec.probs_dtype)


_TRITON = "megalight.ops.permute.triton"
PERMUTATION.register(Backend("triton", lazy(_TRITON, "permutation"), 20, _triton_why_not))
PERMUTE.register(Backend("triton", lazy(_TRITON, "permute"), 20, _triton_why_not))
UNPERMUTE.register(Backend("triton", lazy(_TRITON, "unpermute"), 20, _triton_why_not))
PERMUTATION.register(Backend("reference", reference_permutation, 0, serve_all))
PERMUTE.register(Backend("reference", reference_permute, 0, serve_all))
UNPERMUTE.register(Backend("reference", reference_unpermute, 0, serve_all))


def permutation(
    experts: Tensor,
    num_experts: int,
    *,
    alignment: int = 1,
    capacity: int | None = None,
    rows: int | None = None,
    backend: str = "auto",
) -> Permutation:
    """Find the row of each pair of a token and an expert. Nothing here waits for the device.

    There are three forms:

    - dropless: groups are as long as needed, one after the other, ``R = T k``;
    - dropless and aligned: the size of each group is rounded up to a multiple of ``alignment``, for GEMMs in 8 or 4
      bits;
    - ``capacity`` rows for each expert: all shapes are known beforehand. Each expert keeps its first tokens; use
      :func:`drop` to keep the most probable ones.

    Args:
        experts: ``[T, k]`` integers. Values outside ``[0, E)`` are pairs without a row: dropped, or of other ranks.
        num_experts: ``E``.
        alignment: the sizes of groups are multiples of it.
        capacity: number of rows of each group.
        rows: ``R`` for the dropless forms, if the caller knows how many rows are needed; the default is the most that
            ``T k`` pairs can need. Pairs that find no room get no row.

    Raises:
        ValueError: ``alignment`` or ``capacity`` is less than 1, or ``capacity`` is not a multiple of ``alignment``.
    """
    if alignment < 1:
        raise ValueError(f"alignment={alignment} must be at least 1.")
    if capacity is not None and (capacity < 1 or capacity % alignment):
        raise ValueError(f"capacity={capacity} must be a positive multiple of alignment={alignment}.")
    if capacity is not None:
        rows = capacity * num_experts
    elif rows is None:
        rows = most_rows(experts.numel(), num_experts, alignment)
    spec = PermuteSpec(experts.device.type, torch.bfloat16, torch.float32, num_experts)
    found: Permutation = choose(PERMUTATION, spec, backend)(experts, num_experts, alignment, capacity, rows)
    return found


def drop(experts: Tensor, num_experts: int, capacity: int, priority: Tensor | None = None) -> Tensor:
    """Return ``experts`` with -1 for the pairs that exceed ``capacity`` tokens of an expert.

    Args:
        experts: ``[T, k]`` int64; values outside ``[0, E)`` do not count.
        num_experts: ``E``.
        capacity: number of tokens that each expert keeps.
        priority: ``[T, k]``; each expert keeps its largest ones, usually the probabilities. None: its first tokens.
            Of equal ones, the first is kept.
    """
    flat = experts.flatten()
    # Two stable sorts: first by priority, then by expert. Within an expert, the order by priority remains.
    order = torch.arange(len(flat), device=flat.device)
    if priority is not None:
        order = priority.detach().flatten().sort(descending=True, stable=True).indices
    sorted_experts, within = flat[order].sort(stable=True)
    order = order[within]
    # the place of a pair within its expert: its index less that of the expert's first pair
    place = torch.arange(len(flat), device=flat.device) - torch.searchsorted(sorted_experts, sorted_experts)
    kept = torch.empty_like(flat, dtype=torch.bool).scatter_(0, order, place < capacity)
    return torch.where(kept & (flat >= 0) & (flat < num_experts), flat, -1).view_as(experts)


def permute(
    x: Tensor, where: Permutation, probs: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Copy each token to the rows of its experts: ``[T, h] -> [R, h]``. Other rows are zeros.

    Args:
        x: ``[T, h]``.
        where: the rows of ``T`` tokens.
        probs: ``[T, k]``; if given, the probability of each row is returned too, ``[R]``, and None otherwise.
    """
    probs_dtype = torch.float32 if probs is None else probs.dtype
    spec = PermuteSpec(x.device.type, x.dtype, probs_dtype, where.sizes.shape[0])
    found: tuple[Tensor, Tensor | None] = choose(PERMUTE, spec, backend)(x, where, probs)
    return found


def unpermute(rows: Tensor, where: Permutation, probs: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Sum the rows of each token: ``[R, h] -> [T, h]``. A token without rows gets zeros.

    Half-precision rows are summed in float32 and rounded once.

    Args:
        rows: ``[R, h]``. Rows that belong to no token are not read.
        where: the rows of ``T`` tokens.
        probs: ``[T, k]``, weights of the sum. None: all ones.
    """
    probs_dtype = torch.float32 if probs is None else probs.dtype
    spec = PermuteSpec(rows.device.type, rows.dtype, probs_dtype, where.sizes.shape[0])
    fn = choose(UNPERMUTE, spec, backend)
    if MODE.on:
        return _invariant(fn, rows, where, probs)
    out: Tensor = fn(rows, where, probs)
    return out


def _invariant(fn: Callable[..., Tensor], rows: Tensor, where: Permutation, probs: Tensor | None) -> Tensor:
    if rows.device.type != "cpu":
        return fn(rows, where, probs)
    # A token's own rows alone: with all of them at each token, memory would grow with the square of the tokens.
    kept = where.positions >= 0
    own = rows[where.positions.clamp(min=0).long()] if where.rows else rows.new_zeros(*kept.shape, rows.shape[1])
    places = torch.where(kept, torch.arange(kept.shape[1], dtype=torch.int32), -1)

    def one(places: Tensor, own: Tensor, *probs: Tensor) -> Tensor:
        return fn(own.squeeze(0), replace(where, positions=places, rows=own.shape[1]), *(probs or (None,)))

    out: Tensor = rowwise(one, places, own, *(() if probs is None else (probs,)))
    return out


GROUP = 128
"""Groups begin at multiples of so many columns: a weight gradient takes as many at once, so none has two groups."""


def most_columns(rows: int, num_experts: int) -> int:
    """Return how many columns ``rows`` in so many groups can need at most. It is a multiple of :data:`GROUP`."""
    return most_rows(rows, num_experts, GROUP)
