"""Block tables of the KV cache: blocks of one pool, given to sequences and taken back, with a prefix cache.

:class:`BlockPool` gives each slot a table of blocks. :class:`PrefixCache` finds full blocks with the same first tokens,
which sequences share. :class:`StateSnapshots` keeps the recurrent states that belong to such a prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megalight.errors import DataError, integer

BLOCK_SIZE = 16
"""Tokens of a block where nobody says otherwise."""


def blocks_at_once(lengths: Iterable[int], at_once: int) -> int:
    """Return how many blocks of :data:`BLOCK_SIZE` hold the longest ``at_once`` of these sequences; at least 1.

    Raises:
        ConfigurationError: ``at_once``, the largest number of sequences in a step, is no integer of at least 1.
    """
    at_once = integer("max_sequences", at_once)
    needs = sorted((-(-length // BLOCK_SIZE) for length in lengths), reverse=True)
    return max(1, sum(needs[:at_once]))


class BlockPool:
    """A pool of equally long blocks. Every slot has a table of its blocks, in the order of its tokens.

    Several slots may have a block whose tokens they share (:meth:`remember`). It is taken back from the last of them.
    Even then it can be found until another slot needs it: those that were taken back first go first.

    Args:
        num_slots: maximum number of sequences.
        count: number of blocks in the pool.
        size: tokens of a block.
        snapshots: number of states of sequences that may be kept.

    Attributes:
        tables: the numbers of each slot's blocks.
        table: ``[num_slots, B]`` int32, the same; what follows the last block of a slot is any block.
        prefixes: the blocks that can be found by their tokens.

    Raises:
        ConfigurationError: a number is no integer of at least 1.
    """

    def __init__(self, num_slots: int, count: int, size: int, snapshots: int = 0) -> None:
        num_slots = integer("num_slots", num_slots)
        count = integer("number of blocks", count)
        size = integer("block_size", size)
        self.count, self.size, self.snapshots = count, size, snapshots
        self.tables: list[list[int]] = [[] for _ in range(num_slots)]
        # The same, padded, as arrays are copied to the device in one piece.
        self.table = np.zeros((num_slots, min(count, 64)), np.int32)
        self.prefixes = PrefixCache(size, range(num_slots, num_slots + snapshots))
        # How many slots have each block.
        self._users = [0] * count
        # The last one is given out next: a fresh pool gives its blocks in order.
        self._free = OrderedDict.fromkeys(range(count)[::-1])

    @property
    def free(self) -> int:
        """Number of blocks that no slot has."""
        return len(self._free)

    @property
    def used(self) -> list[int]:
        """The blocks that slots have, or that can be found."""
        return sorted({block for table in self.tables for block in table} | self.prefixes.blocks)

    def holding(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens of one sequence."""
        return -(-tokens // self.size)

    def missing(self, slot: int, tokens: int) -> int:
        """Return how many blocks a slot lacks to hold so many tokens."""
        return max(0, self.holding(tokens) - len(self.tables[slot]))

    def grow(self, tokens: Mapping[int, int]) -> None:
        """Give slots the blocks that they lack to hold so many tokens each.

        Raises:
            DataError: fewer blocks are free; no slot gets any.
        """
        missing = {slot: self.missing(slot, count) for slot, count in tokens.items()}
        if (more := sum(missing.values())) > self.free:
            raise DataError(
                f"sequences of {list(tokens.values())[:8]} tokens need {more} more blocks of {self.size} tokens, and "
                f"{self.free} of {self.count} are free; release sequences, or make the pool larger."
            )
        for slot, count in missing.items():
            if count:
                self._add(slot, [self._fresh() for _ in range(count)])

    def shrink(self, slot: int, tokens: int) -> None:
        """Take back the blocks that a slot does not need to hold so many tokens."""
        table, kept = self.tables[slot], self.holding(tokens)
        # From the last to the first: a block is of use only after those before it.
        for block in table[kept:][::-1]:
            self._take_back(block)
        del table[kept:]

    def share(self, slot: int, blocks: Sequence[int]) -> None:
        """Give a slot without blocks those that were found for its tokens."""
        for block in blocks:
            self._give(block)
        self._add(slot, blocks)

    def remember(self, slot: int, tokens: Sequence[int], stored: int, total: int) -> None:
        """Let the full blocks of a slot be found by their tokens.

        Where another block has the same tokens, the slot gets this one for its own.

        Args:
            slot: the slot.
            tokens: of its sequence.
            stored: how many of them its blocks hold now.
            total: how many of them they hold after the next forward pass. In each layer of the pass all new tokens are
                stored before any is read. So sequences of the same pass may share these blocks.
        """
        table, full = self.tables[slot], total // self.size
        first = full
        while first and table[first - 1] not in self.prefixes:
            first -= 1
        for place in range(first, full):
            before, end = (table[place - 1] if place else None), (place + 1) * self.size
            part = tokens[end - self.size : end]
            known = self.prefixes.after(before, part)
            if known is None:
                self.prefixes.put(before, part, table[place])
            elif end <= stored:
                self._give(known)
                self._take_back(table[place])
                table[place] = self.table[slot, place] = known
            else:
                # The next pass still writes the slot's own block. No other may be written twice.
                break

    def _add(self, slot: int, blocks: Sequence[int]) -> None:
        had, has = len(self.tables[slot]), len(self.tables[slot]) + len(blocks)
        self.tables[slot] += blocks
        if has > self.table.shape[1]:
            wider = np.zeros((len(self.table), min(self.count, 2 * has)), np.int32)
            wider[:, : self.table.shape[1]] = self.table
            self.table = wider
        self.table[slot, had:has] = blocks

    def _fresh(self) -> int:
        block, _ = self._free.popitem()
        self.prefixes.forget(block)
        self._users[block] = 1
        return block

    def _give(self, block: int) -> None:
        self._free.pop(block, None)
        self._users[block] += 1

    def _take_back(self, block: int) -> None:
        self._users[block] -= 1
        if not self._users[block]:
            self._free[block] = None
            if block in self.prefixes:
                self._free.move_to_end(block, last=False)


# Prefix cache


@dataclass(eq=False)
class _BlockTokens:
    """The tokens of a full block, after those of another one.

    Attributes:
        block: where they are.
        tokens: as many as a block has.
        siblings: the parts that follow the same one, by their tokens. It is among them.
        after: the parts that follow, by their tokens.
    """

    block: int
    tokens: tuple[int, ...]
    siblings: _Parts
    after: _Parts = field(default_factory=dict)


_Parts = dict[tuple[int, ...], _BlockTokens]


class PrefixCache:
    """Full blocks, by the tokens in them and in all blocks before: a tree with a part of a sequence in each node.

    What a layer keeps of a token follows from this token and those before it. So a block may serve all sequences with
    these tokens. Tokens themselves are compared, not a hash of them. Each sequence of tokens has at most one block.

    Args:
        size: tokens of a block.
        entries: for states at the ends of blocks.

    Attributes:
        snapshots: the states that are kept.
    """

    def __init__(self, size: int, entries: Iterable[int] = ()) -> None:
        self._size = size
        self.snapshots = StateSnapshots(entries)
        self._first: _Parts = {}
        self._parts: dict[int, _BlockTokens] = {}

    @property
    def blocks(self) -> set[int]:
        """All that can be found."""
        return {*self._parts}

    def __contains__(self, block: int) -> bool:
        """Whether the block can be found."""
        return block in self._parts

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Return the blocks that hold the first tokens of a sequence, as many as there are."""
        found: list[int] = []
        parts = self._first
        for end in range(self._size, len(tokens) + 1, self._size):
            part = parts.get(tuple(tokens[end - self._size : end]))
            if part is None:
                break
            found.append(part.block)
            parts = part.after
        return found

    def after(self, before: int | None, tokens: Sequence[int]) -> int | None:
        """Return the block with these tokens after those of another block (None: at the beginning), if there is one."""
        part = self._after(before).get(tuple(tokens))
        return None if part is None else part.block

    def put(self, before: int | None, tokens: Sequence[int], block: int) -> None:
        """Let a block be found by its tokens, after those of another block (None: at the beginning)."""
        siblings = self._after(before)
        part = _BlockTokens(block, tuple(tokens), siblings)
        siblings[part.tokens] = self._parts[block] = part

    def forget(self, block: int) -> None:
        """Let a block be found no more, because it gets other tokens. There must be none after it."""
        if block in self._parts:
            part = self._parts.pop(block)
            assert not part.after, "blocks are forgotten from the last to the first"
            del part.siblings[part.tokens]
            self.snapshots.forget(block)

    def clear(self) -> None:
        """Let no block be found."""
        self._first, self._parts = {}, {}
        self.snapshots.clear()

    def _after(self, block: int | None) -> _Parts:
        return self._first if block is None else self._parts[block].after


# States of recurrent layers at the ends of blocks


class StateSnapshots:
    """Entries for states, each of a sequence at the end of a full block. The one that was used longest ago goes first.

    Args:
        entries: their numbers.
    """

    def __init__(self, entries: Iterable[int]) -> None:
        self._free = list(entries)
        # By block, from the one that was used longest ago.
        self._kept: OrderedDict[int, int] = OrderedDict()

    def last(self, blocks: Sequence[int]) -> int:
        """Return how many of the blocks of a sequence lie before its last state that is kept."""
        return next((count for count in range(len(blocks), 0, -1) if blocks[count - 1] in self._kept), 0)

    def use(self, block: int) -> int:
        """Return the entry with the state at the end of a block."""
        self._kept.move_to_end(block)
        return self._kept[block]

    def keep(self, block: int) -> int:
        """Return an entry for the state at the end of a block."""
        self._kept[block] = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
        return self._kept[block]

    def forget(self, block: int) -> None:
        """Let the state at the end of a block be found no more."""
        if block in self._kept:
            self._free.append(self._kept.pop(block))

    def clear(self) -> None:
        """Let no state be found."""
        self._free += self._kept.values()
        self._kept.clear()
