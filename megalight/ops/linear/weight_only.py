"""``y = x W^T`` for a few tokens and a weight in e4m3, which becomes half precision in registers, as in decode steps.

A step reads each weight once, whatever the number of tokens, so half the bytes are half the time. Rows of the weight
are the rows of the product on tensor cores, and tokens are its columns: few tokens fill them. With more of them, a
program takes more rows, so that tokens are read less often, and several programs share the columns of a weight with
few rows; a second kernel adds up their parts. Many tokens take the time of their products, and the weight is decoded
before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.jit import OVERLAP, Value, cdiv, constexpr, jit, next_power, start_dependents, tl
from megalight.ops.linear.gemv import gemv
from megalight.ops.quantized_weight import stored_of

COLUMNS = 128
"""Columns of a step, at most those that share a scale."""
WIDE = 8448
"""Rows of a weight from which on programs have 64 of them: one program for each of the 132 SMs of an H200."""
SEVERAL = 16
"""Tokens from which on programs have 64 rows, and share columns."""
PROGRAMS, MOST = 256, 8
"""Programs that are wanted then, and parts of the columns at most."""


@jit
def _product(
    x: Value, weight: Value, scales: Value, bias: Value, y: Value,
    count: Value, out: Value, size: Value,
    SCALED: constexpr, BIAS: constexpr, PARTS: constexpr, TOKENS: constexpr, ROWS: constexpr, COLUMNS: constexpr,
    PDL: constexpr,
) -> None:  # fmt: skip
    """Write the product; with several parts their sums in float32, ``y [PARTS, n, out]``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = row < out
    token = tl.arange(0, TOKENS)
    here = token < count
    column = tl.arange(0, COLUMNS)
    rows = weight + row.to(tl.int64)[:, None] * size + column[None, :]
    inputs = x + token[None, :] * size + column[:, None]
    start_dependents(PDL)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    share = tl.cdiv(tl.cdiv(size, PARTS), COLUMNS) * COLUMNS
    first = tl.program_id(1) * share
    for start in range(first, tl.minimum(first + share, size), COLUMNS):
        inside = start + column < size
        values = tl.load(rows + start, mask=present[:, None] & inside[None, :], other=0.0)
        known = tl.load(inputs + start, mask=inside[:, None] & here[None, :], other=0.0)
        # By way of float32, from which conversions to bfloat16 are fast.
        part = tl.dot(values.to(tl.float32).to(known.dtype), known, input_precision="ieee")
        if SCALED > 0:
            part *= tl.load(scales + row * (size // SCALED) + start // SCALED, mask=present, other=0.0)[:, None]
        total += part
    if SCALED < 0:
        total *= tl.load(scales + row, mask=present, other=0.0)[:, None]
    if BIAS:
        total += tl.load(bias + row, mask=present, other=0.0).to(tl.float32)[:, None]
    place = y + (tl.program_id(1) * count + token)[None, :].to(tl.int64) * out + row[:, None]
    tl.store(place, total.to(y.dtype.element_ty), mask=present[:, None] & here[None, :])


@jit
def _add_parts(
    parts: Value, bias: Value, y: Value, numel: Value, out: Value, BIAS: constexpr, PARTS: constexpr, BLOCK: constexpr,
    PDL: constexpr,
) -> None:  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    start_dependents(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + part * numel + place, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + place % out, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)


def weight_only_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [..., in]``, of at most 64 tokens, times the ``weight [out, in]`` that is stored in e4m3: ``[..., out]``."""
    (out, size), stored = weight.shape, stored_of(weight)
    assert stored is not None, "the weight is stored quantized"
    if x.numel() == size:
        return gemv(x, weight, bias)
    block = stored.data.shape[-1]
    count, pdl = x.numel() // size, OVERLAP.on
    y = x.new_empty(*x.shape[:-1], out)
    rows = 64 if out >= WIDE or count > SEVERAL else 32
    parts = min(MOST, cdiv(PROGRAMS, cdiv(out, rows))) if count > SEVERAL and out < WIDE else 1
    sums = y if parts == 1 else torch.empty(parts, count, out, dtype=torch.float32, device=x.device)
    _product[(cdiv(out, rows), parts)](
        *(x.contiguous(), stored.data, stored.scales, bias, sums, count, out, size),
        SCALED=-1 if block == size else block, BIAS=bias is not None and parts == 1, PARTS=parts,
        TOKENS=max(16, next_power(count)), ROWS=rows, COLUMNS=COLUMNS if block == size else min(COLUMNS, block),
        PDL=pdl, launch_pdl=pdl, num_warps=4, num_stages=5,
    )  # fmt: skip
    if parts > 1:
        _add_parts[(cdiv(y.numel(), 1024),)](
            *(sums, bias, y, y.numel(), out),
            BIAS=bias is not None, PARTS=parts, BLOCK=1024, PDL=pdl, launch_pdl=pdl, num_warps=4,
        )  # fmt: skip
    return y
