"""Products of matrices with a scale per 1 x 128 or 128 x 128 elements, on tensor cores of compute capability 9.0.

A product contracts ``K``, of which there are ``L = ceil(K / 128)`` blocks. cuBLASLt reads the scales of all rows of one
block, then those of the next block (cuBLAS manual, "Element 1D and 128x128 2D Block Scaling for FP8 Data Types"):

============  ==========================================  ===========================
tile          shape                                       strides
============  ==========================================  ===========================
1 x 128       ``[rows, L]``                               ``(1, rows)``
128 x 128     ``[L rounded up to 4, ceil(rows / 128)]``   ``(1, L rounded up to 4)``
============  ==========================================  ===========================

So square tiles lie the other way round: all blocks of ``K`` of one square row, padded to 16 bytes, then the next row.
torch's older ``torch._scaled_mm`` takes these scales without padding only, and cuBLASLt then reads wrong ones wherever
``L`` is no multiple of 4. ``F.scaled_mm`` checks for the shapes and strides above.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.quantize import Quantized

BLOCKS = ((1, 128), (128, 128))
RECIPES = {(1, 128): F.ScalingType.BlockWise1x128, (128, 128): F.ScalingType.BlockWise128x128}
ROWS = 16
"""Rows of a matrix with a scale per 1 x 128 must be a multiple of this. cuBLASLt steps by 16 bytes from block to block,
so 4 may do; but the trial before use has tried multiples of 16."""


def scales(q: Quantized) -> Tensor:
    """Return the scales of a matrix in the order of the hardware: see the table above."""
    height, blocks = q.scale.shape
    if q.scheme.tile == (1, 128):
        # Not a transposed copy: where a dim has size 1, that may have any stride, which torch refuses.
        return q.scale.new_empty_strided((height, blocks), (1, height)).copy_(q.scale)
    # A copy even without padding: cuBLASLt needs scales at multiples of 16 bytes.
    padded = F.pad(q.scale, (0, -blocks % 4)).contiguous()
    columns = padded.shape[1]
    return padded.as_strided((columns, height), (1, columns))


def filled(q: Quantized) -> Quantized:
    """Return a matrix whose rows are a multiple of :data:`ROWS`, with rows of zeros at its end."""
    missing = -len(q.data) % ROWS
    if not missing or q.scheme.tile != (1, 128):
        return q
    # uint8, because 8-bit floats have no padding kernel.
    data = F.pad(q.data.view(torch.uint8), (0, 0, 0, missing)).view(q.data.dtype)
    return replace(q, data=data, scale=F.pad(q.scale, (0, 0, 0, missing)))


def product(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool) -> Tensor:
    """``a [M, K] x b [N, K] -> [M, N]``, rounded to bf16 by the hardware. Sums are always in full float32."""
    left = filled(a)
    y = F.scaled_mm(
        left.data,
        b.data.t(),
        scales(left),
        RECIPES[a.scheme.tile],
        scales(b),
        RECIPES[b.scheme.tile],
        output_dtype=torch.bfloat16,
    )
    return (y if left is a else y[: len(a.data)]).to(dtype)
