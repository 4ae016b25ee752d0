"""The sum of terms in one kernel, which reads each of them once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megalight.ops.jit import Value, cdiv, constexpr, jit, tl

BLOCK = 2048
"""Elements of a program."""


@jit
def _sum(
    out: Value,
    own: Value,
    others: Value,
    numel: Value,
    distance: Value,
    TERMS: constexpr,
    PLACE: constexpr,
    ADD: constexpr,
    BLOCK: constexpr,
) -> None:
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


def sum_terms(out: Tensor, own: Tensor, others: Sequence[Tensor], place: int, add: bool) -> None:
    """Implement :func:`megalight.ops.sum_terms.sum_terms`."""
    # One address and a distance: a kernel cannot take any number of tensors.
    first, second = others[0], others[min(1, len(others) - 1)]
    distance = (second.data_ptr() - first.data_ptr()) // own.itemsize
    if own.numel():
        _sum[(cdiv(own.numel(), BLOCK),)](
            out, own, first, own.numel(), distance, TERMS=len(others) + 1, PLACE=place, ADD=add, BLOCK=BLOCK
        )
