"""``y = W x`` for a single token: a product that only reads the weight, as in the decode steps of one text.

Libraries split such products over few large tiles, and reach 2.5 to 4.1 TB/s for the shapes of an 8B model on an H200.
Here a program reads some rows of the weight from end to end and adds in float32: 3.9 to 4.3 TB/s with the best blocks.
In a CUDA graph a program loads its first part of the weight while the kernel before it still runs (programmatic
dependent launch).
"""

from __future__ import annotations

from torch import Tensor

from megalight.ops.jit import OVERLAP, Value, cdiv, constexpr, jit, start_dependents, tl

ROWS = 4
"""Rows of the weight of a program."""
COLUMNS = 1024
"""Columns that a program loads at once."""


@jit
def _part(weight: Value, present: Value, column: Value, start: Value, size: Value, WHOLE: constexpr) -> Value:
    """Load a part of some rows of the weight, in float32; no masks where all of it is there, for the widest loads."""
    if WHOLE:
        part = tl.load(weight, eviction_policy="evict_first")
    else:
        inside = present[:, None] & (start + column < size)[None, :]
        part = tl.load(weight, mask=inside, other=0.0, eviction_policy="evict_first")
    return part.to(tl.float32)


@jit
def _gemv(
    x: Value,
    weight: Value,
    bias: Value,
    y: Value,
    out: Value,
    size: Value,
    BIAS: constexpr,
    WHOLE: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    PDL: constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    present = row < out
    rows = weight + row.to(tl.int64)[:, None] * size + column[None, :]
    # Only this kernel's own weight is read before the wait: a recorded step writes none.
    part = _part(rows, present, column, 0, size, WHOLE)
    start_dependents(PDL)
    sums = part * tl.load(x + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    for start in range(COLUMNS, size, COLUMNS):
        part = _part(rows + start, present, column, start, size, WHOLE)
        known = tl.load(x + start + column, mask=start + column < size, other=0.0)
        sums += part * known.to(tl.float32)[None, :]
    total = tl.sum(sums, 1)
    if BIAS:
        total += tl.load(bias + row, mask=present, other=0.0).to(tl.float32)
    tl.store(y + row, total.to(y.dtype.element_ty), mask=present)


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [..., in]``, of which there is one, times ``weight [out, in]``, and ``bias [out]``: ``[..., out]``."""
    out, size = weight.shape
    y = x.new_empty(*x.shape[:-1], out)
    pdl = OVERLAP.on
    _gemv[(cdiv(out, ROWS),)](
        *(x.contiguous(), weight, bias, y, out, size),
        BIAS=bias is not None,
        WHOLE=size % COLUMNS == 0 and out % ROWS == 0,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return y
