"""8-bit GEMMs that add to a main gradient in one kernel, with float32 sums after every block of tokens."""

from __future__ import annotations

from torch import Tensor

from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.quantize import Quantized

TILE = {"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128, "BLOCK_TOKENS": 128, "GROUP": 8, "num_warps": 8, "num_stages": 4}
"""Shape of an output tile, tokens per step, and number of tile rows that share operands in the L2 cache."""


@jit
def _accumulate(
    out: Value,
    a: Value,
    b: Value,
    scale_a: Value,
    scale_b: Value,
    rows: Value,
    columns: Value,
    tokens: Value,
    stride: Value,
    ADD: constexpr,
    BLOCK_ROWS: constexpr,
    BLOCK_COLUMNS: constexpr,
    BLOCK_TOKENS: constexpr,
    GROUP: constexpr,
) -> None:
    tiles_down = tl.cdiv(rows, BLOCK_ROWS)
    tiles_across = tl.cdiv(columns, BLOCK_COLUMNS)
    program = tl.program_id(0)
    # Programs are numbered down GROUP rows of tiles before they move across, so that tiles that run at the same time
    # read the same rows of `a` and columns of `b` from the L2 cache.
    first = program // (GROUP * tiles_across) * GROUP
    height = tl.minimum(tiles_down - first, GROUP)
    within = program % (GROUP * tiles_across)
    row = (first + within % height) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (within // height) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    token = tl.arange(0, BLOCK_TOKENS)
    # Rows and columns beyond the edge wrap around: they are computed but not stored, and need no masks.
    left = a + (row % rows).to(tl.int64)[:, None] * tokens + token[None, :]
    right = b + (column % columns).to(tl.int64)[None, :] * tokens + token[:, None]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, tokens, BLOCK_TOKENS):
        inside = start + token < tokens
        x = tl.load(left, mask=inside[None, :], other=0.0)
        y = tl.load(right, mask=inside[:, None], other=0.0)
        # Tensor cores accumulate 8-bit GEMMs with fewer bits than float32: move sums to float32 after every block.
        total = tl.dot(x, y, total, max_num_imprecise_acc=BLOCK_TOKENS)
        left += BLOCK_TOKENS
        right += BLOCK_TOKENS
    # One scale per matrix: it factors out of the sum, and is applied once, in float32, before the addition.
    total *= tl.load(scale_a) * tl.load(scale_b)
    # int64: a large weight has more elements than an int32 offset can count.
    target = out + row.to(tl.int64)[:, None] * stride + column[None, :]
    stored = (row < rows)[:, None] & (column < columns)[None, :]
    if ADD:
        total += tl.load(target, mask=stored, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=stored)


def accumulate(out: Tensor, a: Quantized, b: Quantized, write: bool) -> None:
    """Implement :func:`megalight.ops.scaled_accumulate.scaled_accumulate`."""
    (rows, tokens), columns = a.data.shape, len(b.data)
    tiles = cdiv(rows, TILE["BLOCK_ROWS"]) * cdiv(columns, TILE["BLOCK_COLUMNS"])
    if tiles:
        _accumulate[(tiles,)](
            out,
            a.data.contiguous(),
            b.data.contiguous(),
            a.scale,
            b.scale,
            rows,
            columns,
            tokens,
            out.stride(0),
            ADD=not write,
            **TILE,
        )
