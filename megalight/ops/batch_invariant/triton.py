"""Kernels of batch-invariant mode: products with fixed tiles, and log-sum-exps of rows.

Tiles of a product have a number of columns and of features per step that follows from the weight, so each result is
the sum of the same terms in the same order. Tiles of 64 or 128 rows differ in the number of warp groups, each of which
runs the same instructions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.ops.common import HALF, last_contiguous, num_sms
from megalight.ops.jit import LOG2E, Value, cdiv, constexpr, jit, next_power, tl, triton

FEW: dict[str, Any] = {"ROWS": 64, "num_warps": 4, "num_stages": 4}
"""Tile of products of few rows."""
MANY: dict[str, Any] = {"ROWS": 128, "num_warps": 8, "num_stages": 3}
"""Tile of products of many rows."""
HALF_TILE = {"COLUMNS": 64, "DEPTH": 128}, {"COLUMNS": 128, "DEPTH": 64}
"""Columns, and features per step, of a narrow weight in half precision, and of a wide one."""
WIDE = 8192
"""Columns from which on a weight is wide: narrow ones need small tiles, so that few rows occupy all SMs."""
SINGLE_TILE = {"COLUMNS": 64, "DEPTH": 32}
"""The same of float32."""


# One kernel for any number of rows: another one, for 1 or for multiples of 16, would be compiled in other ways.
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product(
    x: Value, weight: Value, bias: Value, offsets: Value, y: Value,
    rows: Value, columns: Value, depth: Value, x_row: Value, num_groups: Value,
    GROUPS: constexpr, BIAS: constexpr, EVEN: constexpr, ROWS: constexpr, COLUMNS: constexpr, DEPTH: constexpr,
    PRECISION: constexpr,
) -> None:  # fmt: skip
    """``GROUPS`` is 0 for one weight ``[columns, depth]``, or a power of 2 for ``num_groups`` of them."""
    across = tl.cdiv(columns, COLUMNS)
    if GROUPS > 0:
        group = tl.arange(0, GROUPS)
        known = group < num_groups
        ends = tl.load(offsets + group, mask=known, other=0)
        starts = tl.load(offsets + group - 1, mask=known & (group > 0), other=0)
        tiles = tl.cdiv(ends - starts, ROWS) * across
        until = tl.cumsum(tiles, 0)
        count = tl.sum(tiles, 0)
    else:
        count = tl.cdiv(rows, ROWS) * across
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        within = tile
        start = 0
        end = rows
        own = weight
        if GROUPS > 0:
            expert = tl.sum(tl.where(known & (until <= tile), 1, 0), 0)
            within = tile - tl.sum(tl.where(group < expert, tiles, 0), 0)
            start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
            end = tl.load(offsets + expert)
            own = weight + expert.to(tl.int64) * columns * depth
        # Tiles below each other run at the same time, and share columns of the weight.
        down = tl.cdiv(end - start, ROWS)
        row = start + within % down * ROWS + tl.arange(0, ROWS)
        column = within // down * COLUMNS + tl.arange(0, COLUMNS)
        feature = tl.arange(0, DEPTH)
        # Beyond the end any row will do: it is not stored.
        left = x + tl.minimum(row, end - 1).to(tl.int64)[:, None] * x_row + feature[None, :]
        right = own + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * depth + feature[None, :]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, depth, DEPTH):
            if EVEN:
                a = tl.load(left + first)
                b = tl.load(right + first)
            else:
                inside = (first + feature < depth)[None, :]
                a = tl.load(left + first, mask=inside, other=0.0)
                b = tl.load(right + first, mask=inside, other=0.0)
            total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
        if BIAS:
            total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        target = y + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(target, total.to(y.dtype.element_ty), mask=(row < end)[:, None] & (column < columns)[None, :])


def product(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor | None = None) -> Tensor:
    """Run the kernel: ``x [R, in]``, ``weight [out, in]``, or with ``offsets [E]`` of groups ``[E, out, in]``."""
    (rows, depth), columns = x.shape, weight.shape[-2]
    if x.dtype != weight.dtype or x.dtype not in (*HALF, torch.float32):
        raise ConfigurationError(
            f"batch-invariant mode multiplies bfloat16, float16 or float32 of one kind on a GPU, not {x.dtype} with "
            f"{weight.dtype}."
        )
    x, weight = last_contiguous(x), weight.contiguous()
    y = x.new_empty(rows, columns)
    if not rows:
        return y
    half = x.dtype in HALF
    # Of the weight alone: a batch must not change what is summed together.
    shape = HALF_TILE[columns >= WIDE] if half else SINGLE_TILE
    groups = 1 if offsets is None else len(offsets)
    tile = MANY if half and rows >= groups * MANY["ROWS"] else FEW
    tiles = (cdiv(rows, tile["ROWS"]) + groups - 1) * cdiv(columns, shape["COLUMNS"])
    _product[(min(tiles, 2 * num_sms(x.device)),)](
        *(x, weight, bias, offsets, y, rows, columns, depth, x.stride(0), groups),
        GROUPS=0 if offsets is None else next_power(groups), BIAS=bias is not None, EVEN=depth % shape["DEPTH"] == 0,
        PRECISION="tf32" if half else "ieee", **shape, **tile,
    )  # fmt: skip
    return y


BLOCK = 4096
"""Columns of a row that are read at once."""


@jit
def _log_sum_exp(logits: Value, out: Value, stride: Value, columns: Value, BLOCK: constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + column < columns
        x = tl.load(logits + row * stride + start + column, mask=inside, other=-float("inf")).to(tl.float32) * LOG2E
        higher = tl.maximum(largest, x)
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp2(largest - shift) + tl.exp2(x - shift)
        largest = higher
    top = tl.max(largest, 0)
    whole = tl.sum(total * tl.exp2(largest - top), 0)
    tl.store(out + row, (top + tl.log2(whole)) / LOG2E)


def log_sum_exp(logits: Tensor) -> Tensor:
    """``[n, V] -> [n]`` in float32."""
    logits = last_contiguous(logits)
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _log_sum_exp[(len(logits),)](logits, out, logits.stride(0), logits.shape[1], BLOCK=BLOCK, num_warps=8)
    return out
