"""Which rows of a cache belong to which sequence: blocks of rows from one pool, given out and taken back."""

from __future__ import annotations

from collections.abc import Mapping

from megalight.errors import ConfigurationError, DataError


class Blocks:
    """A pool of equally long blocks. Every slot has a table of its blocks, in the order of its tokens.

    Args:
        num_slots: maximum number of sequences.
        count: number of blocks in the pool.
        size: tokens of a block.

    Attributes:
        tables: the numbers of each slot's blocks.

    Raises:
        ConfigurationError: a number is below 1.
    """

    def __init__(self, num_slots: int, count: int, size: int) -> None:
        for name, value in (("num_slots", num_slots), ("number of blocks", count), ("block_size", size)):
            if value < 1:
                raise ConfigurationError(f"{name} is {value}; it must be at least 1.")
        self.count, self.size = count, size
        self.tables: list[list[int]] = [[] for _ in range(num_slots)]
        # The last of the list is given out next: a fresh pool gives its blocks in order.
        self._free = list(range(count))[::-1]

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
            self.tables[slot] += [self._free.pop() for _ in range(count)]

    def shrink(self, slot: int, tokens: int) -> None:
        """Take back the blocks that a slot does not need to hold so many tokens."""
        table, kept = self.tables[slot], self.holding(tokens)
        self._free += table[kept:][::-1]
        del table[kept:]
