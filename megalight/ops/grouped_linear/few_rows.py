"""Grouped products of a few rows with weights in half precision or e4m3, which are read once, as in decode steps.

A program has some rows of one expert's weight, and all rows of the group: the rows of the weight are those of the
product on tensor cores, and tokens are its columns, as in :mod:`megalight.ops.linear.weight_only`. Experts without
tokens are not read. Values in e4m3 become half precision in registers.
"""

from __future__ import annotations

from torch import Tensor

from megalight.ops.jit import OVERLAP, Value, cdiv, constexpr, jit, next_power, start_dependents, tl
from megalight.ops.quantized_weight import stored_of

ROWS, COLUMNS = 64, 128
"""Rows of a weight that a program has, and columns of a step, at most those that share a scale."""
MEAN = 16
"""Mean number of rows of a group up to which this kernel serves."""
MOST = 32
"""Rows of a group that a program has at once, at most."""


@jit
def _product(
    x: Value, weight: Value, scales: Value, offsets: Value, y: Value, out: Value,
    size: Value,
    SCALED: constexpr, TOKENS: constexpr, ROWS: constexpr, COLUMNS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """``SCALED`` is the number of columns with one scale, -1 for whole rows, or 0 without scales."""
    expert = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = row < out
    column = tl.arange(0, COLUMNS)
    place = expert.to(tl.int64) * out + row
    rows = weight + place[:, None] * size + column[None, :]
    start_dependents(PDL)
    first = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    # Nearly always once: a group of more tokens reads the weight again.
    for some in range(first, end, TOKENS):
        token = some + tl.arange(0, TOKENS)
        here = token < end
        inputs = x + token.to(tl.int64)[None, :] * size + column[:, None]
        total = tl.zeros((ROWS, TOKENS), tl.float32)
        for start in range(0, size, COLUMNS):
            inside = start + column < size
            values = tl.load(rows + start, mask=present[:, None] & inside[None, :], other=0.0)
            known = tl.load(inputs + start, mask=inside[:, None] & here[None, :], other=0.0)
            if SCALED != 0:
                # By way of float32, from which conversions to bfloat16 are fast.
                values = values.to(tl.float32).to(known.dtype)
            part = tl.dot(values, known, input_precision="ieee")
            if SCALED > 0:
                part *= tl.load(scales + place * (size // SCALED) + start // SCALED, mask=present, other=0.0)[:, None]
            total += part
        if SCALED < 0:
            total *= tl.load(scales + place, mask=present, other=0.0)[:, None]
        target = y + token.to(tl.int64)[None, :] * out + row[:, None]
        tl.store(target, total.to(y.dtype.element_ty), mask=present[:, None] & here[None, :])


def few_rows_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """``[R, in] x [E, out, in] -> [R, out]`` of a weight that is stored in e4m3, or is of the dtype of ``x``.

    Rows after the last group get any values.
    """
    (experts, out, size), stored, pdl = weight.shape, stored_of(weight), OVERLAP.on
    y = x.new_empty(len(x), out)
    block = 0 if stored is None else stored.data.shape[-1]
    # Twice the mean, as groups differ.
    tokens = min(MOST, max(16, next_power(2 * cdiv(len(x), experts))))
    _product[(cdiv(out, ROWS), experts)](
        x.contiguous(), *((weight, None) if stored is None else (stored.data, stored.scales)), *(offsets, y, out, size),
        SCALED=-1 if block == size else block, TOKENS=tokens, ROWS=ROWS,
        COLUMNS=COLUMNS if block in (0, size) else min(COLUMNS, block), PDL=pdl, launch_pdl=pdl, num_warps=4,
        num_stages=5,
    )  # fmt: skip
    return y
