"""The programs of the backward pass on Hopper, in the order in which they start.

Each multiprocessor runs one program at a time, and takes the next of the list when it is done.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.attention.blocks import listed_keys, table_of
from megalight.ops.attention.hopper import KEYS
from megalight.ops.common import num_multiprocessors
from megalight.ops.jit import cdiv

ROWS = 64
"""Queries of a step."""

HEADS = 4
"""Key heads whose large blocks have their turn together: their queries and sums are in the cache."""

LARGE = 0.8
"""Share of all work that is in large blocks. The small ones of all heads come last, and fill gaps."""

WAYS: tuple[tuple[int, float], ...] = ((1, LARGE), (2, 0.8), (2, 0.85), (2, 0.9))
"""Into how many programs small blocks of a window are divided, by the heads of their group, and the share of large
blocks. In four, meetings took what evenness had won."""

TURNS = 8
"""Programs of a multiprocessor above which none is divided: one more or less matters little then."""

BEGIN = 1.1
"""Steps that a program could do in the time in which it begins and ends."""

MEET = 6.0
"""The same of a part, whose sums go through memory. Measured with windows of 1024 and 2048."""


class Programs(NamedTuple):
    """The programs of a pass.

    Attributes:
        table: ``[n, 10]`` int32: a row of :func:`megalight.ops.attention.blocks.key_blocks`, the number of the first
            block of queries of the sequence, the head of keys, the part and how many there are, and the number of the
            divided block.
        split: how many pairs of block and head are divided.
        parts: into how many programs.
    """

    table: Tensor
    split: int
    parts: int


def together(key_heads: int) -> int:
    """Return how many heads of keys have their turn together."""
    return max(some for some in range(1, HEADS + 1) if key_heads % some == 0)


@lru_cache(maxsize=64)
def programs(
    lengths: tuple[int, ...],
    keys: tuple[int, ...],
    causal: bool,
    window: int | None,
    key_heads: int,
    group: int,
    device: torch.device,
) -> Programs:
    """Return the programs. Small blocks are divided if that makes the fullest multiprocessor less full.

    With windows nearly all blocks are equally large, so that some multiprocessors have one more than others. Without,
    the small ones even this out.
    """
    numbers, start, number = {}, 0, 0
    for length in lengths:
        numbers[start] = number
        start, number = start + length, number + cdiv(length, ROWS)
    blocks = [(max(0, seen), (*row, numbers[row[0]])) for seen, row in listed_keys(lengths, keys, KEYS, causal, window)]
    best = _listed(blocks, key_heads, *WAYS[0])
    if window is not None and len(blocks) * key_heads <= TURNS * (slots := num_multiprocessors(device)):
        others = [_listed(blocks, key_heads, *way) for way in WAYS[1:] if group % way[0] == 0]
        best = min([best, *others], key=lambda rows: fullest([(seen, row[-2]) for seen, row in rows], group, slots))
    parts = max((row[-2] for _, row in best), default=1)
    split = {row[-1] for _, row in best if row[-2] > 1}
    return Programs(table_of([row for _, row in best], device), len(split), parts)


def _listed(blocks: list[Any], key_heads: int, parts: int, share: float) -> list[tuple[int, tuple[int, ...]]]:
    """Return the rows of all programs, each with how many queries see the block."""
    some, total = together(key_heads), sum(seen for seen, _ in blocks)
    before = accumulate((seen for seen, _ in blocks), initial=0)
    large = sum(sum_ < share * total for sum_ in list(before)[:-1])
    found = [
        (seen, (*row, turn + head, 0, 1, 0))
        for turn in range(0, key_heads, some)
        for seen, row in blocks[:large]
        for head in range(some)
    ]
    for index, (seen, row) in enumerate(blocks[large:]):
        for head in range(key_heads):
            found += [(seen, (*row, head, part, parts, index * key_heads + head)) for part in range(parts)]
    return found


def fullest(listed: list[tuple[int, int]], group: int, slots: int) -> float:
    """Return the work of the fullest of ``slots`` multiprocessors, in steps.

    Args:
        listed: how many queries see the block of each program, and into how many parts it is divided.
        group: heads of queries of a head of keys.
        slots: number of multiprocessors.
    """
    full = [0.0] * slots
    for seen, parts in listed:
        work = group // parts * cdiv(seen, ROWS) + (BEGIN if parts == 1 else MEET)
        heapq.heapreplace(full, full[0] + work)
    return max(full)
