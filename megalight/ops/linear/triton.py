"""``main_grad += grad_y^T x`` in one kernel: half-precision operands, float32 sums, no temporary."""

from __future__ import annotations

from torch import Tensor

from megalight.ops.jit import Value, cdiv, constexpr, jit, tl

TILE = {"BLOCK_OUT": 128, "BLOCK_IN": 256, "BLOCK_TOKENS": 64, "GROUP": 8, "num_warps": 8, "num_stages": 4}
"""Shape of an output tile, tokens per step, and number of tile rows that share operands in the L2 cache."""


@jit
def _accumulate(
    main_grad: Value,
    grad_y: Value,
    x: Value,
    tokens: Value,
    size_out: Value,
    size_in: Value,
    main_stride: Value,
    grad_stride: Value,
    x_stride: Value,
    ADD: constexpr,
    BLOCK_OUT: constexpr,
    BLOCK_IN: constexpr,
    BLOCK_TOKENS: constexpr,
    GROUP: constexpr,
) -> None:
    tiles_out = tl.cdiv(size_out, BLOCK_OUT)
    tiles_in = tl.cdiv(size_in, BLOCK_IN)
    program = tl.program_id(0)
    # Programs are numbered group by group, so that tiles with the same operands run at the same time.
    group = program // (GROUP * tiles_in)
    first = group * GROUP
    height = tl.minimum(tiles_out - first, GROUP)
    within = program % (GROUP * tiles_in)
    row = (first + within % height) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = (within // height) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    token = tl.arange(0, BLOCK_TOKENS)
    # Rows and columns beyond the edge wrap around: they are computed but not stored, and need no masks.
    grad_tile = grad_y + token.to(tl.int64)[:, None] * grad_stride + (row % size_out)[None, :]
    x_tile = x + token.to(tl.int64)[:, None] * x_stride + (column % size_in)[None, :]
    target = main_grad + row.to(tl.int64)[:, None] * main_stride + column[None, :]
    stored = (row < size_out)[:, None] & (column < size_in)[None, :]
    # The sum starts from the old value. To load that at the end would need as many registers again.
    total = tl.load(target, mask=stored, other=0.0) if ADD else tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    for start in range(0, tokens, BLOCK_TOKENS):
        inside = (start + token < tokens)[:, None]
        a = tl.load(grad_tile, mask=inside, other=0.0)
        # Only the summed dim needs a mask: zeros in both operands add nothing.
        b = tl.load(x_tile, mask=inside, other=0.0)
        total = tl.dot(tl.trans(a), b, total)
        grad_tile += BLOCK_TOKENS * grad_stride
        x_tile += BLOCK_TOKENS * x_stride
    tl.store(target, total, mask=stored)


def accumulate(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    """Add ``grad_y^T x`` to float32 ``main_grad [out, in]``; operands ``[T, out]`` and ``[T, in]`` of one half dtype.

    ``write``: start the sum from zero, which overwrites ``main_grad``.
    """
    size_out, size_in = main_grad.shape
    # The kernel needs unit stride in the last dim.
    grad_y = grad_y if grad_y.stride(-1) == 1 else grad_y.contiguous()
    x = x if x.stride(-1) == 1 else x.contiguous()
    tiles = cdiv(size_out, TILE["BLOCK_OUT"]) * cdiv(size_in, TILE["BLOCK_IN"])
    _accumulate[(tiles,)](
        main_grad,
        grad_y,
        x,
        grad_y.shape[0],
        size_out,
        size_in,
        main_grad.stride(0),
        grad_y.stride(0),
        x.stride(0),
        ADD=not write,
        **TILE,
    )
