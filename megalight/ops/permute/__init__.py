"""Bring tokens into groups by expert, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import lazy, serve_all, triton_why_not
from megalight.ops.permute import reference
from megalight.ops.permute.reference import Permutation, most_rows
from megalight.registry import Backend, BackendRegistry, remembered

__all__ = ["REGISTRIES", "Permutation", "PermuteSpec", "drop", "most_rows", "permutation", "permute", "unpermute"]


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
PERMUTATION.register(Backend("reference", reference.permutation, 0, serve_all))
PERMUTE.register(Backend("reference", reference.permute, 0, serve_all))
UNPERMUTE.register(Backend("reference", reference.unpermute, 0, serve_all))


@remembered
def _choose(
    registry: BackendRegistry[PermuteSpec, Callable[..., Any]], spec: PermuteSpec, backend: str
) -> Callable[..., Any]:
    return registry.select(spec, backend).fn


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
    found: Permutation = _choose(PERMUTATION, spec, backend)(experts, num_experts, alignment, capacity, rows)
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
    found: tuple[Tensor, Tensor | None] = _choose(PERMUTE, spec, backend)(x, where, probs)
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
    out: Tensor = _choose(UNPERMUTE, spec, backend)(rows, where, probs)
    return out


GROUP = 128
"""Groups begin at multiples of so many columns: a weight gradient takes as many at once, so none has two groups."""


def most_columns(rows: int, num_experts: int) -> int:
    """Return how many columns ``rows`` in so many groups can need at most. It is a multiple of :data:`GROUP`."""
    return most_rows(rows, num_experts, GROUP)
