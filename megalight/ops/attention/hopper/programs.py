"""The programs of the backward pass on Hopper, in the order in which they start.

Each SM runs one program at a time, and takes the next of the list when it is done.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.ops.attention.hopper import KEYS
from megalight.ops.attention.triton_blocks import listed_keys, table_of
from megalight.ops.common import num_sms
from megalight.ops.jit import cdiv

ROWS = 64
"""Queries of a step."""

HEADS = 4
"""Key heads whose large blocks have their turn together: their queries and sums are in the cache."""

LARGE = 0.8
"""Share of all work that is in large blocks. The small ones of all heads come last, and fill gaps."""

SMALL: tuple[tuple[int, float], ...] = ((2, 0.8), (2, 0.85), (2, 0.9))
"""Into how many programs small blocks of a window are divided, by the heads of their group, and the share of large
blocks. In four, meetings took what evenness had won."""

TURNS = 8
"""Programs of an SM above which no small ones are divided: one more or less matters little then."""

LONG: tuple[tuple[int, float], ...] = ((2, 0), (2, 0.33), (2, 0.67), (4, 0), (4, 0.33), (4, 0.67))
"""Into how many programs long blocks are divided, and how long they are at least, relative to the longest."""

FEW = 2
"""Programs of an SM up to which long ones may be divided: they take longer than all of its others."""

EVEN = 1.05
"""How much more work than the mean the fullest SM may have before blocks are divided."""

BEGIN = 1.1
"""Steps that a program could do in the time in which it begins and ends."""

MEET = 6.0
"""The same of a part, whose sums go through memory. Measured with windows of 1024 and 2048."""


Turn: TypeAlias = tuple[int, int, int]
"""The number of a block, its head of keys, and into how many programs it is divided."""


class BackwardPrograms(NamedTuple):
    """The programs of a pass, on the host.

    Attributes:
        rows: those of :attr:`Programs.table`.
        fullest: the work of the fullest SM, relative to the mean of undivided blocks.
    """

    rows: list[tuple[int, ...]]
    fullest: float


class Programs(NamedTuple):
    """The programs of a pass.

    Attributes:
        table: ``[n, 10]`` int32: a row of :func:`megalight.ops.attention.triton_blocks.key_blocks`, the number of the
            first block of queries of the sequence, the head of keys, the part and how many there are, and the number of
            the divided block.
        split: how many pairs of block and head are divided.
        parts: into how many programs at most.
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
    """Return the programs of :func:`plan`."""
    rows = plan(lengths, keys, causal, window, key_heads, group, num_sms(device)).rows
    parts = max((row[-2] for row in rows), default=1)
    split = len({row[-1] for row in rows if row[-2] > 1})
    return Programs(table_of(rows, device), split, parts)


@lru_cache(maxsize=64)
def plan(
    lengths: tuple[int, ...],
    keys: tuple[int, ...],
    causal: bool,
    window: int | None,
    key_heads: int,
    group: int,
    slots: int,
) -> BackwardPrograms:
    """Return the programs for ``slots`` SMs. Blocks are divided if that makes the fullest one less full.

    With windows nearly all blocks are equally long, so that some SMs have one more than others. Without,
    the small ones even this out; but where there are few, the longest one can take longer than the mean.
    """
    numbers, start, number = {}, 0, 0
    for length in lengths:
        numbers[start] = number
        start, number = start + length, number + cdiv(length, ROWS)
    blocks = [(max(0, seen), (*row, numbers[row[0]])) for seen, row in listed_keys(lengths, keys, KEYS, causal, window)]
    steps = [group * cdiv(seen, ROWS) for seen, _ in blocks]
    mean = max(1.0, sum(steps) * key_heads / slots)
    best = _in_turns(blocks, key_heads, 1, LARGE)
    few, near = len(best) <= FEW * slots, window is not None and len(best) <= TURNS * slots
    # Where nothing is divided, the bound will do.
    least = fullest(_works(best, steps), slots, math.inf if few or near else 0.0)
    ways: list[list[Turn]] = []
    if few and least > EVEN * mean:
        ways += [_longest_first(steps, key_heads, *way) for way in LONG if group % way[0] == 0]
    if near and least > EVEN * mean:
        ways += [_in_turns(blocks, key_heads, *way) for way in SMALL if group % way[0] == 0]
    for way in ways:
        if (found := fullest(_works(way, steps), slots, least)) < least:
            best, least = way, found
    rows, slot = [], 0
    for block, head, parts in best:
        rows += [(*blocks[block][1], head, part, parts, slot if parts > 1 else 0) for part in range(parts)]
        slot += parts > 1
    return BackwardPrograms(rows, least / mean)


def _in_turns(blocks: list[Any], key_heads: int, parts: int, share: float) -> list[Turn]:
    """Return the order in which few heads at a time have their large blocks, and small ones, in parts, come last."""
    some, total = together(key_heads), sum(seen for seen, _ in blocks)
    before = accumulate((seen for seen, _ in blocks), initial=0)
    large = sum(sum_ < share * total for sum_ in list(before)[:-1])
    found = [
        (block, turn + head, 1) for turn in range(0, key_heads, some) for block in range(large) for head in range(some)
    ]
    return found + [(block, head, parts) for block in range(large, len(blocks)) for head in range(key_heads)]


def _longest_first(steps: list[int], key_heads: int, parts: int, least: float) -> list[Turn]:
    """Return the order in which the longest programs come first, with blocks of ``least`` of the longest in parts."""
    into = [parts if count >= least * steps[0] else 1 for count in steps]
    order = sorted(range(len(steps)), key=lambda block: -steps[block] / into[block])
    return [(block, head, into[block]) for block in order for head in range(key_heads)]


def _works(turns: list[Turn], steps: list[int]) -> list[float]:
    """Return the work of each program, in steps."""
    return [steps[block] // parts + (BEGIN if parts == 1 else MEET) for block, _, parts in turns for _ in range(parts)]


def fullest(works: list[float], slots: int, known: float = math.inf) -> float:
    """Return the work of the fullest SM. Each takes the next program when it is done.

    Args:
        works: of the programs, in their order.
        slots: number of SMs.
        known: what another order has. If this one cannot have less, its bound is returned.
    """
    bound = max(max(works, default=0.0), sum(works) / slots)
    if bound >= known:
        return bound
    full = [0.0] * slots
    for work in works:
        heapq.heapreplace(full, full[0] + work)
    return max(full)
