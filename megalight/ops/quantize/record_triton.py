"""One program that keeps the largest of some magnitudes."""

from __future__ import annotations

from torch import Tensor

from megalight.ops.jit import Value, constexpr, jit, next_power, tl

BLOCK = 4096
"""Magnitudes that are read at once."""


@jit
def _record(kept: Value, magnitudes: Value, count: Value, BLOCK: constexpr) -> None:
    place = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        largest = tl.maximum(largest, tl.load(magnitudes + start + place, mask=start + place < count, other=0.0))
    tl.store(kept, tl.maximum(tl.load(kept), tl.max(largest, 0)))


def record_largest(kept: Tensor, magnitudes: Tensor) -> None:
    """Implement :func:`megalight.ops.quantize.record.record_largest`."""
    count = magnitudes.numel()
    block = min(BLOCK, next_power(count))
    _record[(1,)](kept, magnitudes.contiguous(), count, BLOCK=block, num_warps=max(1, min(8, block // 512)))
