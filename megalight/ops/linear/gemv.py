"""``y = W x`` for a single token: a product that only reads the weight, as in the decode steps of one text.

Libraries split such products over few large tiles, and reach 2.5 to 4.1 TB/s for the shapes of an 8B model on an H200.
Here a program reads some rows of the weight from end to end and adds in float32: 3.9 to 4.3 TB/s with the best blocks.
In a CUDA graph a program loads its first part of the weight while the kernel before it still runs (programmatic
dependent launch). A gated activation and the sum with the residual stream come at the end of a product: kernels of
their own would take some microseconds each, a tenth of the products of a layer.

Weights in e4m3 (:mod:`megalight.ops.quantized_weight`) have half the bytes. They become float32 in registers, and the
scale of a row multiplies its sum; those of blocks multiply sums of their columns.
"""

from __future__ import annotations

from torch import Tensor

from megalight.ops.activation.triton import activated
from megalight.ops.jit import OVERLAP, Value, cdiv, constexpr, jit, start_dependents, tl
from megalight.ops.quantized_weight import stored_of

ROWS = 4
"""Rows of the weight of a program; of a gated product, half of them are gates."""
COLUMNS = 2048, 1024, 512
"""Columns that a program loads at once: the first number that divides those of the weight."""
WARPS = 4
FP8_ROWS, FP8_COLUMNS, FP8_WARPS = 4, (2048, 1024), 4
"""The same for weights in e4m3."""


@jit
def _part(weight: Value, present: Value, column: Value, start: Value, size: Value, WHOLE: constexpr) -> Value:
    """Load a part of some rows of the weight; no masks where all of it is there, for the widest loads."""
    if WHOLE:
        part = tl.load(weight, eviction_policy="evict_first")
    else:
        inside = present[:, None] & (start + column < size)[None, :]
        part = tl.load(weight, mask=inside, other=0.0, eviction_policy="evict_first")
    return part


@jit
def _terms(part: Value, x: Value, column: Value, start: Value, size: Value) -> Value:
    """Return the terms of a part, in float32."""
    known = tl.load(x + start + column, mask=start + column < size, other=0.0)
    return part.to(tl.float32) * known.to(tl.float32)[None, :]


@jit
def _sums(
    part: Value, x: Value, scales: Value, present: Value, column: Value, start: Value,
    size: Value,
    SCALED: constexpr, ROWS: constexpr, COLUMNS: constexpr,
) -> Value:  # fmt: skip
    """Return sums of 16 terms each, which a thread loads at once, times scales of blocks: few registers are used."""
    sums = tl.sum(tl.reshape(_terms(part, x, column, start, size), (ROWS, COLUMNS // 16, 16)), 2)
    if SCALED > 0:
        block = (start + tl.arange(0, COLUMNS // 16) * 16) // SCALED
        inside = present[:, None] & (block * SCALED < size)[None, :]
        sums *= tl.load(scales[:, None] + block[None, :], mask=inside, other=0.0)
    return sums


@jit
def _gemv(
    x: Value, weight: Value, scales: Value, bias: Value, residual: Value, y: Value, out: Value,
    size: Value,
    SCALED: constexpr, GATE: constexpr, BIAS: constexpr, ADD: constexpr, WHOLE: constexpr, ROWS: constexpr,
    COLUMNS: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    OWN: constexpr = ROWS // 2 if GATE != "" else ROWS
    lane = tl.arange(0, ROWS)
    place = tl.program_id(0) * OWN + lane % OWN
    present = place < out
    row = place + lane // OWN * out  # gates come first, then as many rows of up
    column = tl.arange(0, COLUMNS)
    rows = weight + row.to(tl.int64)[:, None] * size + column[None, :]
    # Only this kernel's own weight is read before the wait: a recorded step writes none.
    part = _part(rows, present, column, 0, size, WHOLE)
    by_row = scales
    if SCALED > 0:
        by_row = scales + row * (size // SCALED)
    start_dependents(PDL)
    if SCALED == 0:
        sums = _terms(part, x, column, 0, size)
        for start in range(COLUMNS, size, COLUMNS):
            part = _part(rows + start, present, column, start, size, WHOLE)
            sums += _terms(part, x, column, start, size)
    else:
        sums = _sums(part, x, by_row, present, column, 0, size, SCALED, ROWS, COLUMNS)
        for start in range(COLUMNS, size, COLUMNS):
            part = _part(rows + start, present, column, start, size, WHOLE)
            sums += _sums(part, x, by_row, present, column, start, size, SCALED, ROWS, COLUMNS)
    total = tl.sum(sums, 1)
    if SCALED < 0:
        total *= tl.load(scales + row, mask=present, other=0.0)
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
        weight: ``[out, in]``, maybe stored in e4m3; with ``gate``, ``[2 out, in]``: gate first, then up.
        bias: of all rows of the weight.
        residual: ``[..., out]``, added to the result.
        gate: an activation, such as ``silu``: the result is ``act(gate) * up``.
    """
    out, size = weight.shape[0] // (2 if gate else 1), weight.shape[1]
    y = x.new_empty(*x.shape[:-1], out)
    stored = stored_of(weight)
    data, scales, scaled = weight, None, 0
    rows, widths, warps = ROWS, tuple[int, ...](COLUMNS), WARPS
    if stored is not None:
        data, scales, block = stored.data, stored.scales, stored.data.shape[-1]
        # The scale of a whole row waits for the sum.
        scaled = -1 if block == size else block
        rows, widths, warps = FP8_ROWS, FP8_COLUMNS, FP8_WARPS
    own, columns = rows // 2 if gate else rows, next((count for count in widths if not size % count), widths[-1])
    pdl = OVERLAP.on
    _gemv[(cdiv(out, own),)](
        *(x.contiguous(), data, scales, bias, None if residual is None else residual.contiguous(), y, out, size),
        SCALED=scaled, GATE=gate, BIAS=bias is not None, ADD=residual is not None,
        WHOLE=size % columns == 0 and out % own == 0, ROWS=rows, COLUMNS=columns, PDL=pdl, launch_pdl=pdl,
        num_warps=warps,
    )  # fmt: skip
    return y
