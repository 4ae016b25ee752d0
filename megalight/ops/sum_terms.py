"""Sum one term of each rank, in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import serve_all, triton_why_not
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.registry import Backend, BackendRegistry, choose


def reference_sum_terms(out: Tensor, own: Tensor, others: Sequence[Tensor], place: int, add: bool) -> None:
    """Implement :func:`megalight.ops.sum_terms.sum_terms`."""
    terms = [*others[:place], own, *others[place:]]
    total = terms[0].to(torch.promote_types(own.dtype, torch.float32), copy=True)
    for term in terms[1:]:
        total += term
    if add:
        out.add_(total)
    else:
        out.copy_(total)


BLOCK = 2048
"""Elements of a program."""


@jit
def _sum(
    out: Value, own: Value, others: Value, numel: Value, distance: Value,
    TERMS: constexpr, PLACE: constexpr, ADD: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = tl.zeros((BLOCK,), tl.float32)
    for term in tl.static_range(TERMS):
        if term < PLACE:
            total += tl.load(others + term * distance + at, mask=inside, other=0.0).to(tl.float32)
        elif term == PLACE:
            total += tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
        else:
            total += tl.load(others + (term - 1) * distance + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def triton_sum_terms(out: Tensor, own: Tensor, others: Sequence[Tensor], place: int, add: bool) -> None:
    """Implement :func:`megalight.ops.sum_terms.sum_terms`."""
    # One address and a distance: a kernel cannot take any number of tensors.
    first, second = others[0], others[min(1, len(others) - 1)]
    distance = (second.data_ptr() - first.data_ptr()) // own.itemsize
    if own.numel():
        _sum[(cdiv(own.numel(), BLOCK),)](
            out, own, first, own.numel(), distance, TERMS=len(others) + 1, PLACE=place, ADD=add, BLOCK=BLOCK
        )


class SumTermsSpec(NamedTuple):
    """A request: device type, dtype of the terms, dtype of the sum."""

    device: str
    dtype: torch.dtype
    out_dtype: torch.dtype


SUM_TERMS: BackendRegistry[SumTermsSpec, Callable[..., None]] = BackendRegistry("sum_terms")
REGISTRIES = (SUM_TERMS,)
EXAMPLE = SumTermsSpec("cpu", torch.bfloat16, torch.float32)


def _triton_why_not(spec: SumTermsSpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype, spec.out_dtype)


SUM_TERMS.register(Backend("triton", triton_sum_terms, 20, _triton_why_not))
SUM_TERMS.register(Backend("reference", reference_sum_terms, 0, serve_all))


def sum_terms(
    out: Tensor, own: Tensor, others: Sequence[Tensor], place: int, *, add: bool = False, backend: str = "auto"
) -> None:
    """Sum terms in the order of ranks, in float32 or wider, and round once. So every run gives the same sum.

    Args:
        out: ``[n]``, where the sum goes. It may be the memory of ``own``.
        own: ``[n]``, the term of this rank.
        others: ``[n]`` each, the terms of the other ranks, in the order of ranks. They have the dtype of ``own``, and
            lie at equal distances in one memory.
        place: the rank of ``own``: how many of ``others`` come before it.
        add: add the sum to ``out`` instead.
        backend: a backend's name, or ``auto``.

    Raises:
        BackendError: the named backend cannot serve these dtypes on this device.
    """
    choose(SUM_TERMS, SumTermsSpec(own.device.type, own.dtype, out.dtype), backend)(out, own, others, place, add)
