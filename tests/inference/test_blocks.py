"""Blocks against a model that writes each token down: none leaks, and none has two owners."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalight.inference.blocks import BlockPool, SpanBlocks
from megalight.types import AttentionSpan


class Written:
    """Sequences in a pool, and what each row of it and of its spans holds.

    Args:
        chance: chooses what happens next.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        spans = [AttentionSpan(window=chance.randint(0, 5)), AttentionSpan(chunk=chance.randint(1, 6))]
        slots, count, size = chance.randint(1, 5), chance.randint(1, 12), chance.randint(1, 4)
        counts = {span: chance.randint(1, 12) for span in spans[: chance.randint(0, 2)]}
        self.pool = BlockPool(slots, count, size, snapshots=2, spans=counts)
        self.tokens: list[list[int]] = [[] for _ in self.pool.tables]
        self.stored = [0 for _ in self.pool.tables]
        self.rows: list[dict[int, int]] = [{} for _ in self.pool.pools]

    def operation(self) -> None:
        slot = self.chance.randrange(len(self.tokens))
        if not self.pool.tables[slot]:
            self.begin(slot)
        elif (kind := self.chance.random()) < 0.1:
            self.release(slot)
        elif kind < 0.11:
            self.pool.prefixes.clear()
        elif self.stored[slot] == len(self.tokens[slot]):
            self.append(slot)
        else:
            self.run(slot)

    def begin(self, slot: int) -> None:
        # Of two tokens, so that beginnings are equal.
        self.tokens[slot] = [self.chance.randrange(2) for _ in range(self.chance.randint(1, 20))]
        found = self.pool.find(self.tokens[slot][:-1])
        self.pool.share(slot, found)
        self.stored[slot] = len(found) * self.pool.size
        if not self.pool.reserve(slot, len(self.tokens[slot])):
            self.release(slot)

    def append(self, slot: int) -> None:
        self.pool.slide(slot, self.stored[slot])
        if not self.pool.fits({slot: self.stored[slot] + 1}):
            self.release(slot)
            return
        self.tokens[slot].append(self.chance.randrange(2))
        self.pool.grow({slot: len(self.tokens[slot])})

    def run(self, slot: int) -> None:
        """A forward pass."""
        pool, first = self.pool, self.stored[slot]
        pool.slide(slot, first)
        # Others may have taken what a span needs.
        if (most := min(len(self.tokens[slot]), pool.reach(slot))) <= first:
            self.release(slot)
            return
        total = self.chance.randint(first + 1, most)
        pool.grow({slot: total})
        pool.remember(slot, self.tokens[slot], first, total)
        for place in range(first, total):
            for each, rows in zip(pool.pools, self.rows, strict=True):
                rows[self.row(each, slot, place)] = self.tokens[slot][place]
        self.stored[slot] = total

    def release(self, slot: int) -> None:
        self.pool.shrink(slot, 0)
        self.tokens[slot], self.stored[slot] = [], 0

    def row(self, each: BlockPool | SpanBlocks, slot: int, place: int) -> int:
        block = each.tables[slot][place // each.size - each.first[slot]]
        assert each.table[slot, place // each.size] == block
        return block * each.size + place % each.size

    def check(self) -> None:
        for each, rows in zip(self.pool.pools, self.rows, strict=True):
            users = Counter(block for table in each.tables for block in table)
            assert each._users == [users[block] for block in range(each.count)]
            assert {*each._free} == {*range(each.count)} - {*users}
            for slot, table in enumerate(each.tables):
                assert len(table) == len({*table})
                first = 0
                if isinstance(each, SpanBlocks):
                    first = each.span.first(self.stored[slot])
                    assert each._owners == {own: block for block, own in each._kept.items()}
                    assert each._kept.keys() <= {*self.pool.prefixes.blocks}
                else:
                    assert len(table) == each.holding(len(self.tokens[slot]))
                read = [rows[self.row(each, slot, place)] for place in range(first, self.stored[slot])]
                assert read == self.tokens[slot][first : self.stored[slot]], "another sequence has written here"


def operate(seed: int, count: int) -> None:
    written = Written(random.Random(seed))
    for _ in range(count):
        written.operation()
        written.check()
    for slot in range(len(written.tokens)):
        written.release(slot)
    assert all(each.free == each.count for each in written.pool.pools)


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_no_block_leaks_or_has_two_owners(seed: int) -> None:
    operate(seed, 40)


@pytest.mark.full
def test_a_million_operations() -> None:
    for seed in range(1000):
        operate(seed, 1000)
