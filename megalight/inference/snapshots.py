"""Which states of texts are kept, so that other texts that begin equally go on from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Snapshots:
    """Entries for states, each of a text at the end of a full block. The one that was used longest ago goes first.

    Args:
        entries: their numbers.
    """

    def __init__(self, entries: Iterable[int]) -> None:
        self._free = list(entries)
        # By block, from the one that was used longest ago.
        self._kept: OrderedDict[int, int] = OrderedDict()

    def last(self, blocks: Sequence[int]) -> int:
        """Return how many of the blocks of a text lie before its last state that is kept."""
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
