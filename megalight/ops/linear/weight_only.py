"""``y = x W^T`` for a few tokens and a weight in e4m3, which becomes half precision in registers, as in decode steps.

A step reads each weight once, whatever the number of tokens, so half the bytes are half the time. Rows of the weight
are the rows of the product on tensor cores, and tokens are its columns: few tokens fill them. Many tokens
take the time of their products, and the weight is decoded before.
"""

from __future__ import annotations

from torch import Tensor

from megalight.ops.jit import OVERLAP, Value, cdiv, constexpr, jit, next_power, start_dependents, tl
from megalight.ops.linear.gemv import gemv
from megalight.ops.quantized_weight import stored_of

COLUMNS = 128
"""Columns of a step, at most those that share a scale."""
WIDE = 8448
"""Rows of a weight from which on programs have 64 of them: two programs for each of the 132 SMs of an H200."""


@jit
def _product(
    x: Value,
    weight: Value,
    scales: Value,
    bias: Value,
    y: Value,
    count: Value,
    out: Value,
    size: Value,
    SCALED: constexpr,
    BIAS: constexpr,
    TOKENS: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    PDL: constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = row < out
    token = tl.arange(0, TOKENS)
    here = token < count
    column = tl.arange(0, COLUMNS)
    rows = weight + row.to(tl.int64)[:, None] * size + column[None, :]
    inputs = x + token[None, :] * size + column[:, None]
    start_dependents(PDL)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, size, COLUMNS):
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
    place = y + token[None, :] * out + row[:, None]
    tl.store(place, total.to(y.dtype.element_ty), mask=present[:, None] & here[None, :])


def weight_only_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [..., in]``, of at most 64 tokens, times the ``weight [out, in]`` that is stored in e4m3: ``[..., out]``."""
    (out, size), stored = weight.shape, stored_of(weight)
    assert stored is not None, "the weight is stored quantized"
    if x.numel() == size:
        return gemv(x, weight, bias)
    block = stored.data.shape[-1]
    count, pdl = x.numel() // size, OVERLAP.on
    y = x.new_empty(*x.shape[:-1], out)
    rows = 64 if out >= WIDE else 32
    _product[(cdiv(out, rows),)](
        *(x.contiguous(), stored.data, stored.scales, bias, y, count, out, size),
        SCALED=-1 if block == size else block,
        BIAS=bias is not None,
        TOKENS=max(16, next_power(count)),
        ROWS=rows,
        COLUMNS=min(COLUMNS, block),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
        num_stages=5,
    )
    return y
