"""Grouped GEMMs for Hopper: persistent programs walk the tiles of all groups, with loads by TMA.

A program finds its tiles from the offsets on the device. Tiles of one group that run at the same time have rows and
weights in common, which are then in the L2 cache. With the usual number of rows per expert, a weight is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalight.imports import require
from megalight.ops.common import num_sms
from megalight.ops.grouped_linear import few_rows
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl

Descriptor: Any = require("triton.tools.tensor_descriptor", "a Triton kernel").TensorDescriptor

PRODUCT: dict[str, Any] = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}
"""Tile of a product: rows, columns, features per step, and tiles of rows that share columns of the weight."""

FEW: dict[str, Any] = {"ROWS": 64, "COLUMNS": 256, "DEPTH": 64, "GROUP": 8, "num_warps": 4, "num_stages": 4}
"""Tile of a product of groups with few rows."""

WGRAD: dict[str, Any] = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64, "GROUP": 8, "num_warps": 8, "num_stages": 4}
"""Tile of a weight gradient: rows and columns of the weight, tokens per step, and tiles that share columns."""

PAIR: dict[str, Any] = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "GROUP": 8, "num_warps": 4, "num_stages": 3}
"""Tile of a weight gradient that is written and has few tokens: two programs share an SM, and one computes
while the other writes."""

FEW_TOKENS = 1024
"""Tokens per expert below which writing a weight gradient takes about as long as computing it."""


@jit
def tile_of(within: Value, tiles_down: Value, tiles_across: Value, GROUP: constexpr) -> Any:
    """Return the place of a tile. ``GROUP`` tiles below each other come first, then the next columns."""
    first = within // (GROUP * tiles_across) * GROUP
    height = tl.minimum(tiles_down - first, GROUP)
    within %= GROUP * tiles_across
    return first + within % height, within // height


@jit
def _product(
    x: Value, weight: Value, y: Value, row_scale: Value, column_scale: Value, offsets: Value, num_experts: Value,
    columns: Value, depth: Value,
    TRANSPOSED: constexpr, SCALED: constexpr, IMPRECISE: constexpr, EXPERTS: constexpr, ROWS: constexpr,
    COLUMNS: constexpr, DEPTH: constexpr, GROUP: constexpr,
) -> None:  # fmt: skip
    experts = tl.arange(0, EXPERTS)
    known = experts < num_experts
    # Every program reads all offsets: a few hundred integers, which is cheaper than a kernel that makes a table of
    # tiles.
    ends = tl.load(offsets + experts, mask=known, other=0)
    starts = tl.load(offsets + experts - 1, mask=known & (experts > 0), other=0)
    tiles_across = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(ends - starts, ROWS) * tiles_across
    # Tiles of all groups are numbered in one sequence. Tile t belongs to the first expert whose running count exceeds
    # t.
    tiles_until = tl.cumsum(tiles, 0)
    # Persistent: the number of tiles is only known on the device, so the grid cannot depend on it. `flatten` merges the
    # loop over tiles with the loop over the depth, so loads of the next tile start while this one is stored.
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0), tl.num_programs(0), flatten=True):
        expert = tl.sum(tl.where(known & (tiles_until <= tile), 1, 0), 0)
        within = tile - tl.sum(tl.where(experts < expert, tiles, 0), 0)
        start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets + expert)
        down, across = tile_of(within, tl.cdiv(end - start, ROWS), tiles_across, GROUP)
        row, column = start + down * ROWS, across * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        # TMA reads zeros beyond the last feature, so features of the next expert's weight count for nothing. Rows and
        # columns beyond the group's and the weight's are computed but not stored.
        for start_depth in range(0, depth, DEPTH):
            a = x.load([row, start_depth])
            if TRANSPOSED:
                # Forward: weights `[E * out, in]`, and `depth` is `in`.
                b = weight.load([expert * columns + column, start_depth]).T
            else:
                # Input gradient: `depth` is `out`. A step beyond the expert's last row reads rows of the next expert,
                # but `a` is zero there.
                b = weight.load([expert * depth + start_depth, column])
            total = tl.dot(a, b, total, max_num_imprecise_acc=IMPRECISE)
        rows = row + tl.arange(0, ROWS)
        place = column + tl.arange(0, COLUMNS)
        if SCALED:
            # 8-bit values: scales per row and per column factor out of the sum.
            left = tl.load(row_scale + rows, mask=rows < end, other=0.0)
            right = tl.load(column_scale + expert * columns + place, mask=place < columns, other=0.0)
            total = total * left[:, None] * right[None, :]
        target = y + rows.to(tl.int64)[:, None] * columns + place[None, :]
        tl.store(target, total.to(y.dtype.element_ty), mask=(rows < end)[:, None] & (place < columns)[None, :])


@jit
def _weight_gradient(
    grad_y: Value, x: Value, main_grad: Value, offsets: Value, num_experts: Value, size_out: Value, size_in: Value,
    ADD: constexpr, ROWS: constexpr, COLUMNS: constexpr, DEPTH: constexpr, GROUP: constexpr,
) -> None:  # fmt: skip
    tiles_down, tiles_across = tl.cdiv(size_out, ROWS), tl.cdiv(size_in, COLUMNS)
    tiles = tiles_down * tiles_across
    for tile in tl.range(tl.program_id(0), num_experts * tiles, tl.num_programs(0), flatten=True):
        expert = tile // tiles
        start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets + expert)
        down, across = tile_of(tile % tiles, tiles_down, tiles_across, GROUP)
        row, column = down * ROWS, across * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        # Whole steps need no mask. Only the last, partial step pays for one.
        whole = start + (end - start) // DEPTH * DEPTH
        for token in range(start, whole, DEPTH):
            total = tl.dot(grad_y.load([token, row]).T, x.load([token, column]), total)
        if whole < end:  # what follows belongs to the next group, or to nobody: it may be infinite or NaN
            inside = (whole + tl.arange(0, DEPTH) < end)[:, None]
            a = tl.where(inside, grad_y.load([whole, row]), 0.0)
            b = tl.where(inside, x.load([whole, column]), 0.0)
            total = tl.dot(a.T, b, total)
        rows = row + tl.arange(0, ROWS)
        place = column + tl.arange(0, COLUMNS)
        target = main_grad + (expert.to(tl.int64) * size_out + rows)[:, None] * size_in + place[None, :]
        stored = (rows < size_out)[:, None] & (place < size_in)[None, :]
        total = total.to(main_grad.dtype.element_ty)
        if ADD:  # every element has one program, so the result does not depend on the order of these
            tl.atomic_add(target, total, mask=stored & (start < end), sem="relaxed")
        else:
            tl.store(target, total, mask=stored)


def programs(tiles: int, device: torch.device, each: int = 1) -> int:
    """Return the number of programs: ``each`` per SM, but no more than there are tiles."""
    return max(1, min(tiles, each * num_sms(device)))


def described(matrix: Tensor, rows: int, columns: int) -> Any:
    """Return what loads tiles of ``rows`` by ``columns`` of a matrix by TMA."""
    return Descriptor.from_tensor(matrix, [rows, columns])


def product(x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, transposed: bool) -> Tensor:
    """Multiply each group with its weight; see :mod:`megalight.ops.grouped_linear.backends`."""
    x, weight = x.contiguous(), weight.contiguous()
    num_experts, size_out, size_in = weight.shape
    rows, depth = x.shape
    columns = size_out if transposed else size_in
    y = x.new_empty(rows, columns)
    if not (rows and columns and depth):
        return y.zero_()
    if transposed and rows <= few_rows.MEAN * num_experts:
        return few_rows.few_rows_product(x, weight, offsets)
    # With few rows per expert, most of a tile of 128 rows would be empty.
    tile = PRODUCT if rows >= num_experts * PRODUCT["ROWS"] // 2 else FEW
    launch_product(x, weight.view(num_experts * size_out, size_in), y, offsets, transposed, tile)
    return y


def launch_product(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    offsets: Tensor,
    transposed: bool,
    tile: dict[str, Any],
    scales: tuple[Tensor, Tensor] | None = None,
    fast: bool = True,
) -> None:
    """Write the products of ``x [R, depth]`` with the matrices of ``weight``, one below the other, to ``y``.

    Args:
        x: the rows by group.
        weight: ``[E * columns, depth]``, or ``[E * depth, columns]`` if not transposed.
        y: ``[R, columns]``.
        offsets: ``[E]``: the end of each group.
        transposed: whether each weight is transposed.
        tile: the kernel's tile.
        scales: scales of each row of ``x`` and ``weight``, if they are 8-bit values.
        fast: whether sums of 8 bits may be shorter than float32 over the whole depth, and not only over one step.
    """
    (rows, columns), depth, num_experts = y.shape, x.shape[1], offsets.shape[0]
    wide = (tile["COLUMNS"], tile["DEPTH"]) if transposed else (tile["DEPTH"], tile["COLUMNS"])
    # An upper bound of the tiles: each group may end in one partial tile. The host does not know the true number.
    most = (cdiv(rows, tile["ROWS"]) + num_experts) * cdiv(columns, tile["COLUMNS"])
    _product[(programs(most, x.device),)](
        described(x, tile["ROWS"], tile["DEPTH"]), described(weight, *wide), y, *(scales or (y, y)), offsets,
        num_experts, columns, depth,
        TRANSPOSED=transposed, SCALED=scales is not None, IMPRECISE=None if fast else tile["DEPTH"],
        EXPERTS=next_power(num_experts), **tile,
    )  # fmt: skip


def accumulate(
    main_grad: Tensor, grad_y: Tensor, x: Tensor, offsets: Tensor, sizes: Sequence[int] | None, write: bool
) -> None:
    """Add each group's ``grad_y^T x`` to ``main_grad [E, out, in]``, or write it; sums are in float32."""
    num_experts, size_out, size_in = main_grad.shape
    if not x.shape[0]:
        if write:
            main_grad.zero_()
        return
    tile = PAIR if write and x.shape[0] < FEW_TOKENS * num_experts else WGRAD
    tiles = num_experts * cdiv(size_out, tile["ROWS"]) * cdiv(size_in, tile["COLUMNS"])
    _weight_gradient[(programs(tiles, x.device, 2 if tile is PAIR else 1),)](
        described(grad_y.contiguous(), tile["DEPTH"], tile["ROWS"]),
        described(x.contiguous(), tile["DEPTH"], tile["COLUMNS"]), main_grad, offsets, num_experts, size_out, size_in,
        ADD=not write, **tile,
    )  # fmt: skip
