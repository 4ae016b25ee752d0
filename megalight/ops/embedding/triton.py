"""The gradient of a table, added to its rows by one kernel: only rows that tokens name are read and written.

Tokens are sorted by id. The program at the first token of a run of equal ids sums the run in float32, in the order of
the tokens, and adds to the row once. So there are no atomics, and every run gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl

BLOCK = 512
"""Features of a program."""
ROWS = 16
"""Tokens that a program reads at once, after the first one of a run. Most runs have one."""


@jit
def _add_rows(
    main_grad: Value,
    sorted_ids: Value,
    order: Value,
    grad: Value,
    tokens: Value,
    rows: Value,
    size: Value,
    main_stride: Value,
    grad_stride: Value,
    ROWS: constexpr,
    BLOCK: constexpr,
) -> None:
    first = tl.program_id(0)
    row = tl.load(sorted_ids + first)
    before = tl.load(sorted_ids + first - 1, mask=first > 0, other=-1)
    if (row != before) & (row < rows):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < size
        token = tl.load(order + first).to(tl.int64)
        total = tl.load(grad + token * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        start = first + 1
        # Equal ids are side by side: as soon as one differs, the run has ended.
        running = tl.load(sorted_ids + start, mask=start < tokens, other=-1) == row
        while running:
            place = start + tl.arange(0, ROWS)
            same = tl.load(sorted_ids + place, mask=place < tokens, other=-1) == row
            token_of = tl.load(order + place, mask=same, other=0).to(tl.int64)
            source = grad + token_of[:, None] * grad_stride + column[None, :]
            part = tl.load(source, mask=same[:, None] & inside[None, :], other=0.0)
            total += tl.sum(part.to(tl.float32), 0)
            start += ROWS
            running = tl.load(sorted_ids + start, mask=start < tokens, other=-1) == row
        # int64: a table has more elements than an int32 offset can count.
        target = main_grad + row.to(tl.int64) * main_stride + column
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, total.to(main_grad.dtype.element_ty), mask=inside)


def add_rows(main_grad: Tensor, ids: Tensor, grad: Tensor, write: bool) -> None:
    """Implement :data:`megalight.ops.embedding.AddRows`."""
    if write:
        main_grad.zero_()  # the memory holds anything when a step begins, and most rows get no gradient
    tokens, size = grad.shape
    if not tokens or not size:
        return
    # Stable: equal ids stay in the order of the tokens.
    sorted_ids, order = torch.sort(ids, stable=True)
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    block = min(BLOCK, next_power(size))
    _add_rows[(tokens, cdiv(size, block))](
        main_grad,
        sorted_ids,
        order,
        grad,
        tokens,
        len(main_grad),
        size,
        main_grad.stride(0),
        grad.stride(0),
        ROWS=ROWS,
        BLOCK=block,
        num_warps=4,
    )
