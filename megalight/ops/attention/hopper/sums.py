"""Gradients of queries as sums in float32, which lie in memory as they lie in registers.

A block of 64 queries and 64 features is one piece of memory: the copy engine adds it as a whole, and threads write 16
bytes each to shared memory, side by side. In rows of tokens both took longer (docs/performance/log.md).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention.blocks import table_of
from megalight.ops.attention.hopper.programs import ROWS, together
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl

WIDTH = 128
"""Numbers in a line of the matrix of sums."""

LINES = ROWS * ROWS // WIDTH
"""Lines of a part, which has as many features as queries."""


@lru_cache(maxsize=64)
def query_blocks(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the blocks of queries by number, ``[n, 2]`` int32: the first token, and how many tokens there are."""
    rows: list[tuple[int, ...]] = []
    start = 0
    for length in lengths:
        rows += [(start + first, min(ROWS, length - first)) for first in range(0, length, ROWS)]
        start += length
    return table_of(rows, device)


@jit
def _late_first(turn: Value, key_heads: Value, some: Value, GROUP: constexpr) -> Any:
    """Return the head of a turn: those whose sums are added to last come first, as they are still in the cache."""
    member = turn % (some * GROUP)
    key_head = key_heads - (turn // (some * GROUP) + 1) * some + member % some
    return key_head * GROUP + GROUP - 1 - member // some


@jit
def _attention_prepare(
    out: Value, grad: Value, delta: Value, sums: Value, tickets: Value, tokens: Value, heads: Value, blocks: Value,
    some: Value, count: Value,
    GROUP: constexpr,
) -> None:  # fmt: skip
    """Set one block's sums and 64 tickets to 0, and multiply 8 tokens' outputs of 8 heads with their gradients."""
    program = tl.program_id(0)
    places = program * 64 + tl.arange(0, 64)
    tl.store(tickets + places, tl.zeros((64,), tl.int32), mask=places < count)
    if program < heads * blocks:
        # The sums that are needed first are set last.
        head = _late_first(program // blocks, heads // GROUP, some, GROUP)
        piece = sums + (head * blocks + program % blocks).to(tl.int64) * 8192
        tl.store(piece + tl.arange(0, 8192), tl.zeros((8192,), tl.float32))
    parts = tl.cdiv(heads, 8)
    row = (program // parts * 8 + tl.arange(0, 8))[:, None]
    head = (program % parts * 8 + tl.arange(0, 8))[None, :]
    within = (row < tokens) & (head < heads)
    place = ((row * heads + head).to(tl.int64) * 128)[:, :, None] + tl.arange(0, 128)[None, None, :]
    x = tl.load(out + place, mask=within[:, :, None], other=0.0).to(tl.float32)
    y = tl.load(grad + place, mask=within[:, :, None], other=0.0).to(tl.float32)
    tl.store(delta + head * tokens + row, tl.sum(x * y, 2), mask=within)


def prepare(out: Tensor, grad: Tensor, blocks: int, group: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums over features of outputs times their gradients ``[H, T]``, sums of 0, and tickets of 0.

    Args:
        out: ``[T, H, 128]``.
        grad: ``[T, H, 128]``, contiguous.
        blocks: number of blocks of queries.
        group: heads of queries of a head of keys.
        count: number of tickets.
    """
    tokens, heads, _ = out.shape
    delta = torch.empty(heads, tokens, dtype=torch.float32, device=out.device)
    sums = torch.empty(heads * blocks * 2 * LINES, WIDTH, dtype=torch.float32, device=out.device)
    tickets = torch.empty(max(1, count), dtype=torch.int32, device=out.device)
    grid = (max(heads * blocks, cdiv(tokens, 8) * cdiv(heads, 8), cdiv(count, 64)),)
    some = together(heads // group)
    _attention_prepare[grid](
        out, grad, delta, sums, tickets, tokens, heads, blocks, some, count, GROUP=group, num_warps=4
    )
    return delta, sums, tickets


@jit
def _attention_round(
    sums: Value, out: Value, table: Value, slope: Value, blocks: Value, heads: Value, some: Value, GROUP: constexpr
) -> None:
    block = tl.program_id(0)
    head = _late_first(tl.program_id(1), heads // GROUP, some, GROUP)
    start = tl.load(table + 2 * block)
    rows = tl.load(table + 2 * block + 1)
    inside = tl.arange(0, 64)
    for part in tl.static_range(2):
        piece = sums + ((head * blocks + block) * 2 + part).to(tl.int64) * 4096
        x = (tl.load(piece + tl.arange(0, 4096)) * slope).to(out.dtype.element_ty)
        # Features in eights, warps, rows and features of a thread's corner, second row, second feature.
        x = x.reshape(8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, 64)
        place = ((start + inside).to(tl.int64) * heads + head)[:, None] * 128 + part * 64 + inside[None, :]
        tl.store(out + place, x, mask=(inside < rows)[:, None])


def round_sums(sums: Tensor, out: Tensor, table: Tensor, slope: float, group: int) -> None:
    """Multiply sums by ``slope`` and round them to ``out`` ``[T, H, 128]``; ``group`` is as in :func:`prepare`."""
    heads: Any = out.shape[1]
    some = together(heads // group)
    _attention_round[(len(table), heads)](sums, out, table, slope, len(table), heads, some, GROUP=group, num_warps=4)
