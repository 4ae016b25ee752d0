"""Blocks against a model that writes each token down: none leaks, and none has two owners."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalight.inference.blocks import BlockPool


class Written:
    """Sequences in a pool, and what each row of it holds.

    Args:
        chance: chooses what happens next.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.pool = BlockPool(chance.randint(1, 5), chance.randint(1, 12), chance.randint(1, 4), snapshots=2)
        self.tokens: list[list[int]] = [[] for _ in self.pool.tables]
        self.stored = [0 for _ in self.pool.tables]
        self.rows: dict[int, int] = {}

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
        self.tokens[slot] = [self.chance.randrange(2) for _ in range(self.chance.randint(1, 9))]
        found = self.pool.prefixes.find(self.tokens[slot][:-1])
        self.pool.share(slot, found)
        self.stored[slot] = len(found) * self.pool.size
        if self.pool.missing(slot, len(self.tokens[slot])) > self.pool.free:
            self.release(slot)
        else:
            self.pool.grow({slot: len(self.tokens[slot])})

    def append(self, slot: int) -> None:
        if self.pool.missing(slot, len(self.tokens[slot]) + 1) > self.pool.free:
            self.release(slot)
            return
        self.tokens[slot].append(self.chance.randrange(2))
        self.pool.grow({slot: len(self.tokens[slot])})

    def run(self, slot: int) -> None:
        """A forward pass."""
        first, size = self.stored[slot], self.pool.size
        total = self.chance.randint(first + 1, len(self.tokens[slot]))
        self.pool.remember(slot, self.tokens[slot], first, total)
        for place in range(first, total):
            self.rows[self.pool.tables[slot][place // size] * size + place % size] = self.tokens[slot][place]
        self.stored[slot] = total

    def release(self, slot: int) -> None:
        self.pool.shrink(slot, 0)
        self.tokens[slot], self.stored[slot] = [], 0

    def check(self) -> None:
        pool = self.pool
        users = Counter(block for table in pool.tables for block in table)
        assert pool._users == [users[block] for block in range(pool.count)]
        assert {*pool._free} == {*range(pool.count)} - {*users}
        for slot, table in enumerate(pool.tables):
            assert len(table) == len({*table}) == pool.holding(len(self.tokens[slot]))
            assert pool.table[slot, : len(table)].tolist() == table
            read = [
                self.rows[table[place // pool.size] * pool.size + place % pool.size]
                for place in range(self.stored[slot])
            ]
            assert read == self.tokens[slot][: self.stored[slot]], "another sequence has written here"


def operate(seed: int, count: int) -> None:
    written = Written(random.Random(seed))
    for _ in range(count):
        written.operation()
        written.check()
    for slot in range(len(written.tokens)):
        written.release(slot)
    assert written.pool.free == written.pool.count


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_no_block_leaks_or_has_two_owners(seed: int) -> None:
    operate(seed, 40)


@pytest.mark.full
def test_a_million_operations() -> None:
    for seed in range(1000):
        operate(seed, 1000)
