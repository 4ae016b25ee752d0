"""Which rows of a cache belong to which sequences: blocks of rows from one pool, given out and taken back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from megalight.errors import DataError, integer
from megalight.inference.prefixes import Prefixes

BLOCK_SIZE = 16
"""Tokens of a block where nobody says otherwise."""


def blocks_at_once(lengths: Iterable[int], at_once: int) -> int:
    """Return how many blocks of :data:`BLOCK_SIZE` hold the longest ``at_once`` of these texts; at least 1.

    Raises:
        ConfigurationError: ``at_once``, the largest number of texts in a step, is no integer of at least 1.
    """
    at_once = integer("max_sequences", at_once)
    needs = sorted((-(-length // BLOCK_SIZE) for length in lengths), reverse=True)
    return max(1, sum(needs[:at_once]))


class Blocks:
    """A pool of equally long blocks. Every slot has a table of its blocks, in the order of its tokens.

    Several slots may have a block whose tokens they share (:meth:`remember`). It is taken back from the last of them.
    Even then it can be found until another slot needs it: those that were taken back first go first.

    Args:
        num_slots: maximum number of sequences.
        count: number of blocks in the pool.
        size: tokens of a block.
        snapshots: number of states of texts that may be kept.

    Attributes:
        tables: the numbers of each slot's blocks.
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
        self.prefixes = Prefixes(size, range(num_slots, num_slots + snapshots))
        # How many slots have each block.
        self._users = [0] * count
        # The last one is given out next: a fresh pool gives its blocks in order.
        self._free = OrderedDict.fromkeys(range(count)[::-1])

    @property
    def free(self) -> int:
        """Number of blocks that no slot has."""
        return len(self._free)

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
            self.tables[slot] += [self._fresh() for _ in range(count)]

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
        self.tables[slot] += blocks

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
                table[place] = known
            else:
                # The next pass still writes the slot's own block. No other may be written twice.
                break

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
