"""Grouped GEMMs of 8-bit values on tensor cores. All tiles are found from the offsets on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.grouped_linear.triton import described, launch_product, programs, tile_of
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl
from megalight.ops.permute import GROUP, most_columns
from megalight.ops.quantize import TINY
from megalight.ops.quantize.formats import DTYPES, LARGEST, Quantized, Scheme

FAST: dict[str, Any] = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 128, "GROUP": 8, "num_warps": 8, "num_stages": 3}
"""Tile of a forward product. Tensor cores sum products of 8 bits with 14 bits."""

EXACT: dict[str, Any] = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 128, "GROUP": 8, "num_warps": 8, "num_stages": 4}
"""Tile of products of gradients: each step's sum is added to a second one, in float32, so half as much fits."""

CAST = {"TOKENS": 128, "FEATURES": 64, "num_warps": 4}
"""Tile of a transposed cast. A program walks down the tokens of one group."""


@jit
def _columns(
    x: Value, data: Value, scale: Value, amax: Value, offsets: Value, num_experts: Value,
    features: Value, length: Value, amax_of_expert: Value, amax_of_feature: Value,
    GIVEN: constexpr, STACK: constexpr, EXPERTS: constexpr, LARGEST: constexpr, SMALLEST: constexpr, POWER: constexpr,
    PAD: constexpr, TOKENS: constexpr, FEATURES: constexpr,
) -> None:  # fmt: skip
    """Cast the transpose of one group's features: of ``length`` rows of a stack's matrix, or of a group of tokens."""
    expert = tl.program_id(0)
    f = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    known = f < features
    if STACK:
        start, size, stop = expert * length, length, length
        target = data + expert.to(tl.int64) * features * length
    else:
        experts = tl.arange(0, EXPERTS)
        ends = tl.load(offsets + experts, mask=experts < num_experts, other=0)
        starts = tl.load(offsets + experts - 1, mask=(experts < num_experts) & (experts > 0), other=0)
        sizes = ends - starts
        start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        size = tl.load(offsets + expert) - start
        stop = tl.cdiv(size, PAD) * PAD
        target = data + tl.sum(tl.where(experts < expert, tl.cdiv(sizes, PAD) * PAD, 0), 0)
    if GIVEN:
        largest = tl.load(amax + expert * amax_of_expert + f * amax_of_feature, mask=known, other=1.0)
    else:
        largest = tl.zeros((FEATURES,), tl.float32)
        for first in range(0, size, TOKENS):
            t = first + tl.arange(0, TOKENS)
            place = x + (start + t).to(tl.int64)[:, None] * features + f[None, :]
            tile = tl.load(place, mask=(t < size)[:, None] & known[None, :], other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(tile), 0))
    # Correctly rounded, as in `megalight.ops.quantize.triton`: the reference gives the same quantized values.
    factor = tl.div_rn(LARGEST, tl.maximum(largest, SMALLEST))
    if POWER:
        factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    tl.store(scale + expert * features + f, tl.div_rn(1.0, factor), mask=known)
    for first in range(0, stop, TOKENS):
        t = first + tl.arange(0, TOKENS)
        place = x + (start + t).to(tl.int64)[:, None] * features + f[None, :]
        tile = tl.load(place, mask=(t < size)[:, None] & known[None, :], other=0.0).to(tl.float32)
        y = tile * factor[None, :]
        y = tl.where(y > LARGEST, LARGEST, y)  # unlike minimum and maximum, comparisons keep NaN
        y = tl.where(y < -LARGEST, -LARGEST, y).to(data.dtype.element_ty)
        # Rows from `size` to `stop` get quantized values of zero, so that a weight gradient needs no mask.
        place = target + f.to(tl.int64)[:, None] * length + t[None, :]
        tl.store(place, tl.trans(y), mask=known[:, None] & (t < stop)[None, :])


@jit
def _weight_gradient(
    grad: Value, x: Value, grad_scale: Value, x_scale: Value, main_grad: Value, offsets: Value, num_experts: Value,
    size_out: Value, size_in: Value,
    ADD: constexpr, EXPERTS: constexpr, ROWS: constexpr, COLUMNS: constexpr, DEPTH: constexpr, GROUP: constexpr,
) -> None:  # fmt: skip
    experts = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + experts, mask=experts < num_experts, other=0)
    starts = tl.load(offsets + experts - 1, mask=(experts < num_experts) & (experts > 0), other=0)
    # DEPTH is the multiple at which groups begin.
    padded = tl.cdiv(ends - starts, DEPTH) * DEPTH
    tiles_down, tiles_across = tl.cdiv(size_out, ROWS), tl.cdiv(size_in, COLUMNS)
    tiles = tiles_down * tiles_across
    for tile in tl.range(tl.program_id(0), num_experts * tiles, tl.num_programs(0), flatten=True):
        expert = tile // tiles
        start = tl.sum(tl.where(experts < expert, padded, 0), 0)
        stop = start + tl.sum(tl.where(experts == expert, padded, 0), 0)
        down, across = tile_of(tile % tiles, tiles_down, tiles_across, GROUP)
        row, column = down * ROWS, across * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for token in range(start, stop, DEPTH):
            # Quantized values lie along the tokens: tensor cores read 8 bits only if the contracted dim is contiguous.
            total = tl.dot(grad.load([row, token]), x.load([column, token]).T, total, max_num_imprecise_acc=DEPTH)
        rows = row + tl.arange(0, ROWS)
        place = column + tl.arange(0, COLUMNS)
        left = tl.load(grad_scale + expert * size_out + rows, mask=rows < size_out, other=0.0)
        right = tl.load(x_scale + expert * size_in + place, mask=place < size_in, other=0.0)
        total = (total * left[:, None] * right[None, :]).to(main_grad.dtype.element_ty)
        target = main_grad + (expert.to(tl.int64) * size_out + rows)[:, None] * size_in + place[None, :]
        stored = (rows < size_out)[:, None] & (place < size_in)[None, :]
        if ADD:  # every element has one program, so the result does not depend on the order of these
            tl.atomic_add(target, total, mask=stored & (start < stop), sem="relaxed")
        else:
            tl.store(target, total, mask=stored)


def columns(x: Tensor, scheme: Scheme, offsets: Tensor | None, amax: Tensor | None) -> Quantized:
    """Implement ``columns_of_groups``; with a stack of matrices and no offsets, ``columns_of_stack``."""
    x, features = x.contiguous(), x.shape[-1]
    if offsets is None:
        num_experts, length = x.shape[:2]
        shape, scales = (num_experts * features, length), (num_experts * features, 1)
    else:
        num_experts = offsets.shape[0]
        length = most_columns(x.shape[0], num_experts)
        shape, scales = (features, length), (num_experts, features)
    data = torch.empty(shape, dtype=DTYPES[scheme.format], device=x.device)
    scale = torch.empty(scales, device=x.device)
    if num_experts and features:
        _columns[(num_experts, cdiv(features, CAST["FEATURES"]))](
            x, data, scale, x if amax is None else amax, x if offsets is None else offsets, num_experts, features,
            length, *((0, 0) if amax is None else amax.stride()),
            GIVEN=amax is not None, STACK=offsets is None, EXPERTS=next_power(num_experts),
            LARGEST=LARGEST[scheme.format], SMALLEST=TINY, POWER=scheme.scale == "power", PAD=GROUP, **CAST,
        )  # fmt: skip
    return Quantized(data, scale, scheme)


def product(x: Quantized, weight: Quantized, offsets: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """Implement ``product``."""
    y = torch.empty(len(x.data), len(weight.data) // len(offsets), dtype=dtype, device=x.data.device)
    if y.numel():
        launch_product(x.data, weight.data, y, offsets, True, FAST if fast else EXACT, (x.scale, weight.scale), fast)
    return y


def accumulate(main_grad: Tensor, grad: Quantized, x: Quantized, offsets: Tensor, write: bool) -> None:
    """Implement ``add_weight_gradient``; sums are in float32."""
    num_experts, size_out, size_in = main_grad.shape
    if not grad.data.shape[1]:
        if write:
            main_grad.zero_()
        return
    tiles = num_experts * cdiv(size_out, EXACT["ROWS"]) * cdiv(size_in, EXACT["COLUMNS"])
    _weight_gradient[(programs(tiles, main_grad.device),)](
        described(grad.data, EXACT["ROWS"], EXACT["DEPTH"]), described(x.data, EXACT["COLUMNS"], EXACT["DEPTH"]),
        grad.scale, x.scale, main_grad, offsets, num_experts, size_out, size_in,
        ADD=not write, EXPERTS=next_power(num_experts), **EXACT,
    )  # fmt: skip
