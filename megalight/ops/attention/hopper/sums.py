"""Gradients of queries as sums in float32, which lie in memory as they lie in registers.

A block of 64 queries and 64 features is one piece of memory: the copy engine adds it as a whole, and threads write 16
bytes each to shared memory, side by side. In rows of tokens both took longer (docs/performance/log.md).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention.blocks import listed_keys, table_of
from megalight.ops.jit import Value, cdiv, jit, tl

ROWS = 64
"""Queries of a block, and features of one of its two parts."""

WIDTH = 128
"""Numbers in a line of the matrix of sums."""

LINES = ROWS * ROWS // WIDTH
"""Lines of a part."""


LARGE = 0.8
"""Share of all work that is in blocks of keys whose heads take turns."""


@lru_cache(maxsize=64)
def key_blocks(
    lengths: tuple[int, ...], keys: tuple[int, ...], size: int, causal: bool, window: int | None, device: torch.device
) -> tuple[Tensor, int]:
    """Return the blocks of keys ``[n, 6]`` int32, and how many of them are large.

    Rows are as in :mod:`megalight.ops.attention.blocks`, and have the number of the first block of queries of the
    sequence besides.
    """
    numbers, start, number = {}, 0, 0
    for length in lengths:
        numbers[start] = number
        start, number = start + length, number + cdiv(length, ROWS)
    blocks = listed_keys(lengths, keys, size, causal, window)
    seen = list(accumulate(max(0, count) for count, _ in blocks))
    large = sum(before < LARGE * seen[-1] for before in [0, *seen[:-1]])
    return table_of([(*row, numbers[row[0]]) for _, row in blocks], device), large


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
def _round(sums: Value, out: Value, table: Value, slope: Value, blocks: Value, heads: Value) -> None:
    block = tl.program_id(0)
    head = tl.program_id(1)
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


def round_sums(sums: Tensor, out: Tensor, table: Tensor, slope: float) -> None:
    """Multiply sums by ``slope`` and round them to ``out`` ``[T, H, 128]``."""
    heads: Any = out.shape[1]
    _round[(len(table), heads)](sums, out, table, slope, len(table), heads, num_warps=4)
