"""``y = W x`` for a single token: a product that only reads the weight, as in the decode steps of one text.

Libraries split such products over few large tiles, and reach 2.5 to 4.1 TB/s for the shapes of an 8B model on an H200.
Here a program reads some rows of the weight from end to end and adds in float32: 3.9 to 4.3 TB/s with the best blocks.
In a CUDA graph a program loads its first part of the weight while the kernel before it still runs (programmatic
dependent launch). A gated activation and the sum with the residual stream come at the end of a product: kernels of
their own would take some microseconds each, a tenth of the products of a layer.
"""

from __future__ import annotations

from torch import Tensor

from megalight.ops.activation.triton import activated
from megalight.ops.jit import OVERLAP, Value, cdiv, constexpr, jit, start_dependents, tl

ROWS = 4
"""Rows of the weight of a program; of a gated product, half of them are gates."""
COLUMNS = 2048, 1024
"""Columns that a program loads at once: the first number that divides those of the weight."""


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
    residual: Value,
    y: Value,
    out: Value,
    size: Value,
    GATE: constexpr,
    BIAS: constexpr,
    ADD: constexpr,
    WHOLE: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    PDL: constexpr,
) -> None:
    OWN: constexpr = ROWS // 2 if GATE != "" else ROWS
    lane = tl.arange(0, ROWS)
    place = tl.program_id(0) * OWN + lane % OWN
    present = place < out
    row = place + lane // OWN * out  # gates come first, then as many rows of up
    column = tl.arange(0, COLUMNS)
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
    # Rounded as the outputs of kernels of their own.
    if GATE != "" or ADD:
        total = total.to(y.dtype.element_ty).to(tl.float32)
    if GATE != "":
        pair = tl.reshape(total, (2, OWN))
        first = (tl.arange(0, 2) == 0)[:, None]
        gate, up = tl.sum(tl.where(first, pair, 0.0), 0), tl.sum(tl.where(first, 0.0, pair), 0)
        total = activated(gate, GATE) * up
        place = tl.program_id(0) * OWN + tl.arange(0, OWN)
        present = place < out
    if ADD:
        total += tl.load(residual + place, mask=present, other=0.0).to(tl.float32)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=present)


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, *, gate: str = "") -> Tensor:
    """``x [..., in]``, of which there is one, times ``weight [out, in]``, and ``bias [out]``: ``[..., out]``.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``; with ``gate``, ``[2 out, in]``: gate first, then up.
        bias: of all rows of the weight.
        residual: ``[..., out]``, added to the result.
        gate: an activation, such as ``silu``: the result is ``act(gate) * up``.
    """
    out, size = weight.shape[0] // (2 if gate else 1), weight.shape[1]
    y = x.new_empty(*x.shape[:-1], out)
    own, columns = ROWS // 2 if gate else ROWS, next((count for count in COLUMNS if not size % count), COLUMNS[-1])
    pdl = OVERLAP.on
    _gemv[(cdiv(out, own),)](
        *(x.contiguous(), weight, bias, None if residual is None else residual.contiguous(), y, out, size),
        GATE=gate,
        BIAS=bias is not None,
        ADD=residual is not None,
        WHOLE=size % columns == 0 and out % own == 0,
        ROWS=ROWS,
        COLUMNS=columns,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return y
