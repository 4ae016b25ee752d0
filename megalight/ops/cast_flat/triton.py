"""Flat quantization in one kernel: values are rounded, scaled and written as codes in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.quantize.formats import LARGEST
from megalight.ops.quantize.reference import TINY
from megalight.ops.quantize.types import Scheme

BLOCK = 4096
"""Elements of a program."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@jit
def scaled(value: Value, amax: Value, LARGEST: constexpr, SMALLEST: constexpr, POWER: constexpr) -> Value:
    """Scale and clamp float32 values as the cast of matrices does, so that codes are equal bit by bit."""
    factor = tl.div_rn(LARGEST, tl.maximum(tl.load(amax), SMALLEST))
    if POWER:
        factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    value = value * factor
    value = tl.where(value > LARGEST, LARGEST, value)  # unlike minimum and maximum, comparisons keep NaN
    return tl.where(value < -LARGEST, -LARGEST, value)


@jit
def _cast_flat(
    x: Value,
    out: Value,
    amax: Value,
    largest: Value,
    numel: Value,
    TELL: constexpr,
    ROUNDED: constexpr,
    LARGEST: constexpr,
    SMALLEST: constexpr,
    POWER: constexpr,
    BLOCK: constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    value = tl.load(x + at, mask=inside, other=0.0).to(ROUNDED).to(tl.float32)
    if TELL:
        # As integers, non-negative floats have the same order, and a maximum of integers needs no case for signs.
        tl.atomic_max(largest, tl.max(tl.abs(value), 0).to(tl.int32, bitcast=True), sem="relaxed")
    value = scaled(value, amax, LARGEST, SMALLEST, POWER)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def cast_flat(
    out: Tensor, x: Tensor, scheme: Scheme, amax: Tensor, rounded: torch.dtype, largest: Tensor | None = None
) -> None:
    """Implement :func:`megalight.ops.cast_flat.cast_flat`."""
    if numel := x.numel():
        _cast_flat[(cdiv(numel, BLOCK),)](
            x,
            out,
            amax,
            amax if largest is None else largest.view(torch.int32),
            numel,
            TELL=largest is not None,
            ROUNDED=TYPES[rounded],
            LARGEST=LARGEST[scheme.format],
            SMALLEST=TINY,
            POWER=scheme.scale == "power",
            BLOCK=BLOCK,
            num_warps=8,
        )
