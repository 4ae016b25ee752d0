"""Sum the rows of a matrix, such as the gradient of a bias, into memory that may have a sum already."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import num_sms, serve_all, triton_why_not
from megalight.ops.jit import UNIT, Value, cdiv, constexpr, jit, tl
from megalight.ops.norm.triton import sum_programs
from megalight.registry import Backend, BackendRegistry, choose


def reference_sum_rows(out: Tensor, rows: Tensor, add: bool) -> None:
    """Implement :func:`megalight.ops.sum_rows.sum_rows`."""
    wide = torch.promote_types(torch.promote_types(rows.dtype, out.dtype), torch.float32)
    total = rows.sum(0, dtype=wide)
    if add:
        out.add_(total)
    else:
        out.copy_(total)


ROWS, BLOCK = 32, 64
"""Rows and columns of a tile. A row of a tile is 128 bytes in half types."""
PROGRAMS_PER_SM = 4


@jit
def _sum_some(
    rows: Value, sums: Value, count: Value, size: Value, stride: Value,
    ROWS: constexpr, BLOCK: constexpr, UNIT: constexpr,
) -> None:  # fmt: skip
    size, stride = size * UNIT, stride * UNIT
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    # Programs stride over the rows, so that what all of them load is close together in memory at any time.
    for start in tl.range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS, num_stages=3):
        row = start + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < size)[None, :]
        # int64: rows times features exceeds int32 for long batches.
        offsets = row.to(tl.int64)[:, None] * stride + column[None, :]
        total += tl.load(rows + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(1) * size + column, tl.sum(total, 0), mask=column < size)


def triton_sum_rows(out: Tensor, rows: Tensor, add: bool) -> None:
    """Implement :func:`megalight.ops.sum_rows.sum_rows`.

    torch's own sum of a few thousand rows has too few programs to reach the speed of memory.
    """
    count, size = rows.shape
    if not size:
        return
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    blocks = cdiv(size, BLOCK)
    programs = max(1, min(cdiv(count, ROWS), cdiv(PROGRAMS_PER_SM * num_sms(rows.device), blocks)))
    sums = torch.empty(programs, size, dtype=torch.float32, device=rows.device)
    stride = rows.stride(0)
    unit = math.gcd(size, stride, UNIT)
    _sum_some[(blocks, programs)](
        rows, sums, count, size // unit, stride // unit, ROWS=ROWS, BLOCK=BLOCK, UNIT=unit, num_warps=4
    )
    sum_programs(out, sums, add)


class SumRowsSpec(NamedTuple):
    """A request: device type, dtype of the rows, dtype of the sum."""

    device: str
    dtype: torch.dtype
    out_dtype: torch.dtype


SUM_ROWS: BackendRegistry[SumRowsSpec, Callable[..., None]] = BackendRegistry("sum_rows")
REGISTRIES = (SUM_ROWS,)
EXAMPLE = SumRowsSpec("cpu", torch.bfloat16, torch.float32)


def _triton_why_not(spec: SumRowsSpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype, spec.out_dtype)


SUM_ROWS.register(Backend("triton", triton_sum_rows, 20, _triton_why_not))
SUM_ROWS.register(Backend("reference", reference_sum_rows, 0, serve_all))


def sum_rows(out: Tensor, rows: Tensor, *, add: bool, backend: str = "auto") -> None:
    """Sum ``rows [n, size]`` in float32 or wider, and write the sum to ``out [size]``, or add it.

    The order of the sum is fixed by the shapes: every run gives the same bits.

    Args:
        out: ``[size]``.
        rows: ``[n, size]``; there may be none.
        add: add the sum to ``out`` instead of overwriting it.
        backend: a backend's name, or ``auto``.

    Raises:
        BackendError: the named backend cannot serve these dtypes on this device.
    """
    choose(SUM_ROWS, SumRowsSpec(rows.device.type, rows.dtype, out.dtype), backend)(out, rows, add)
