"""Block tables of the KV cache: blocks of one pool, given to sequences and taken back, with a prefix cache.

:class:`BlockPool` gives each slot a table of blocks. :class:`PrefixCache` finds full blocks with the same first tokens,
which sequences share. :class:`StateSnapshots` keeps the recurrent states that belong to such a prefix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megalight.errors import DataError, integer
from megalight.types import AttentionSpan

BLOCK_SIZE = 16
"""Tokens of a block where nobody says otherwise."""
STEADY = 2
"""Blocks beyond those of its span with which a sequence goes on.

A span begins anywhere in its first block. The host may know one token less than have run.
"""


def blocks_at_once(lengths: Iterable[int], at_once: int) -> int:
    """Return how many blocks of :data:`BLOCK_SIZE` hold the longest ``at_once`` of these sequences; at least 1.

    Raises:
        ConfigurationError: ``at_once``, the largest number of sequences in a step, is no integer of at least 1.
    """
    at_once = integer("max_sequences", at_once)
    needs = sorted((-(-length // BLOCK_SIZE) for length in lengths), reverse=True)
    return max(1, sum(needs[:at_once]))


class _Blocks(ABC):
    """Blocks of one pool. Every slot has a table of its blocks, in the order of its tokens.

    Args:
        num_slots: maximum number of sequences.
        count: number of blocks.
        size: tokens of a block.

    Attributes:
        tables: the numbers of each slot's blocks.
        first: how many blocks of a slot's sequence come before those of its table, and are gone.
        table: ``[num_slots, B]`` int32: the blocks of each slot by their place in its sequence. Others are any block.
    """

    def __init__(self, num_slots: int, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.tables: list[list[int]] = [[] for _ in range(num_slots)]
        self.first = [0] * num_slots
        # The same, padded, as arrays are copied to the device in one piece.
        self.table = np.zeros((num_slots, 64), np.int32)
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
        return sorted({block for table in self.tables for block in table}.union(self._known))

    def holding(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens of one sequence."""
        return -(-tokens // self.size)

    def missing(self, slot: int, tokens: int) -> int:
        """Return how many blocks a slot lacks to hold so many tokens."""
        return max(0, self.holding(tokens) - self.first[slot] - len(self.tables[slot]))

    def room(self, slot: int) -> int:
        """Return how many tokens a slot holds with all free blocks."""
        return (self.first[slot] + len(self.tables[slot]) + self.free) * self.size

    @property
    @abstractmethod
    def _known(self) -> Collection[int]:
        """The blocks that can be found."""

    @abstractmethod
    def _forget(self, block: int) -> None:
        """Let a block be found no more, because it gets other tokens."""

    def _cut(self, slot: int, tokens: int) -> None:
        """Take back the blocks that a slot does not need to hold so many tokens."""
        table, kept = self.tables[slot], max(0, self.holding(tokens) - self.first[slot])
        # From the last to the first: a block is of use only after those before it.
        for block in table[kept:][::-1]:
            self._take_back(block)
        del table[kept:]

    def _add(self, slot: int, blocks: Sequence[int]) -> None:
        had = self.first[slot] + len(self.tables[slot])
        has = had + len(blocks)
        self.tables[slot] += blocks
        if has > self.table.shape[1]:
            wider = np.zeros((len(self.table), 2 * has), np.int32)
            wider[:, : self.table.shape[1]] = self.table
            self.table = wider
        self.table[slot, had:has] = blocks

    def _replace(self, slot: int, place: int, block: int) -> None:
        """Give a slot a block with the same tokens in the place of its own."""
        self._give(block)
        self._take_back(self.tables[slot][place - self.first[slot]])
        self.tables[slot][place - self.first[slot]] = self.table[slot, place] = block

    def _fresh(self) -> int:
        block, _ = self._free.popitem()
        self._forget(block)
        self._users[block] = 1
        return block

    def _give(self, block: int) -> None:
        self._free.pop(block, None)
        self._users[block] += 1

    def _take_back(self, block: int) -> None:
        self._users[block] -= 1
        if not self._users[block]:
            self._free[block] = None
            if block in self._known:
                self._free.move_to_end(block, last=False)


class SpanBlocks(_Blocks):
    """The blocks of layers that see a limited span of earlier tokens. A slot gives back those that lie before it.

    They can be found by the block of the :class:`BlockPool` with the same tokens.

    Args:
        span: what the layers see.
        num_slots: maximum number of sequences.
        count: number of blocks.
        size: tokens of a block.
    """

    def __init__(self, span: AttentionSpan, num_slots: int, count: int, size: int) -> None:
        super().__init__(num_slots, count, size)
        self.span = span
        # The block for each block of the pool, and the reverse.
        self._kept: dict[int, int] = {}
        self._owners: dict[int, int] = {}

    @property
    def steady(self) -> int:
        """How many blocks a sequence needs to go on by one token, whatever its length."""
        return self.holding(self.span.earlier) + STEADY

    def before(self, tokens: int) -> int:
        """Return how many blocks lie before what the next token sees, after so many."""
        return self.span.first(tokens) // self.size

    def slide(self, slot: int, tokens: int) -> None:
        """Take back the blocks of a slot that no token sees after so many."""
        if (more := self.before(tokens) - self.first[slot]) > 0:
            table = self.tables[slot]
            for block in table[:more]:
                self._take_back(block)
            del table[:more]
            self.first[slot] += more

    def begin(self, slot: int, blocks: Sequence[int]) -> None:
        """Give a slot without blocks those that the token after these blocks of the pool needs."""
        self.first[slot] = self.before(len(blocks) * self.size)
        own = [self._kept[block] for block in blocks[self.first[slot] :]]
        for block in own:
            self._give(block)
        self._add(slot, own)

    def runs(self, blocks: Sequence[int]) -> list[int]:
        """For each block of the pool, return how many up to it, one after the other, are kept here."""
        found, run = [], 0
        for block in blocks:
            run = run + 1 if block in self._kept else 0
            found.append(run)
        return found

    def put(self, slot: int, place: int, block: int) -> None:
        """Let a slot's block be found by that of the pool; or give it the one that is."""
        if place < self.first[slot]:
            return
        own, known = self.tables[slot][place - self.first[slot]], self._kept.get(block)
        if known is None:
            self._kept[block], self._owners[own] = own, block
        elif known != own:
            self._replace(slot, place, known)

    def forget(self, block: int) -> None:
        """Let nothing be found by a block of the pool."""
        if (own := self._kept.pop(block, None)) is not None:
            del self._owners[own]

    def clear(self) -> None:
        """Let no block be found."""
        self._kept.clear()
        self._owners.clear()

    @property
    def _known(self) -> Collection[int]:
        return self._owners.keys()

    def _forget(self, block: int) -> None:
        if (owner := self._owners.pop(block, None)) is not None:
            del self._kept[owner]


def span_counts(
    spans: Iterable[AttentionSpan], count: int, size: int, num_slots: int, step_tokens: int
) -> dict[AttentionSpan, int]:
    """Return how many blocks layers that see a span need at most: as many as others have, or as all sequences see.

    Args:
        spans: what they see.
        count: blocks of layers that see all.
        size: tokens of a block.
        num_slots: maximum number of sequences.
        step_tokens: maximum number of tokens of a pass.
    """
    return {
        span: min(count, num_slots * (-(-span.earlier // size) + STEADY) + -(-step_tokens // size)) for span in spans
    }


class BlockPool(_Blocks):
    """A pool of equally long blocks, each with tokens of one sequence in all layers.

    Several slots may have a block whose tokens they share (:meth:`remember`). It is taken back from the last of them.
    Even then it can be found until another slot needs it: those that were taken back first go first.

    Layers that see a limited span of earlier tokens have blocks of their own, which are given back while a sequence
    runs. The pool's own blocks then serve the other layers; without any, they are only numbers.

    Args:
        num_slots: maximum number of sequences.
        count: number of blocks in the pool.
        size: tokens of a block.
        snapshots: number of states of sequences that may be kept.
        spans: the numbers of blocks of layers that see a span.

    Attributes:
        prefixes: the blocks that can be found by their tokens.
        spans: the blocks of layers that see a span.
        pools: all: these, and those of spans.

    Raises:
        ConfigurationError: a number is no integer of at least 1.
    """

    def __init__(
        self,
        num_slots: int,
        count: int,
        size: int,
        snapshots: int = 0,
        spans: Mapping[AttentionSpan, int] | None = None,
    ) -> None:
        num_slots = integer("num_slots", num_slots)
        super().__init__(num_slots, integer("number of blocks", count), integer("block_size", size))
        self.snapshots = snapshots
        self.spans = {
            span: SpanBlocks(span, num_slots, integer("number of blocks", own), size)
            for span, own in (spans or {}).items()
        }
        self.pools: list[BlockPool | SpanBlocks] = [self, *self.spans.values()]
        self.prefixes = PrefixCache(size, range(num_slots, num_slots + snapshots), self.spans.values())

    @property
    def longest(self) -> int:
        """How many tokens of one sequence can be stored, if there is no other."""
        limited = [span for span in self.spans.values() if span.count < span.steady]
        return min(blocks.count * blocks.size for blocks in [self, *limited])

    def fits(self, tokens: Mapping[int, int]) -> bool:
        """Return whether slots can get the blocks that they lack to hold so many tokens each."""
        return all(sum(each.missing(slot, n) for slot, n in tokens.items()) <= each.free for each in self.pools)

    def reach(self, slot: int) -> int:
        """Return how many tokens a slot holds with all free blocks."""
        return min(each.room(slot) for each in self.pools)

    def grow(self, tokens: Mapping[int, int]) -> None:
        """Give slots the blocks that they lack to hold so many tokens each.

        Raises:
            DataError: fewer blocks are free; no slot gets any.
        """
        missing = [[(slot, each.missing(slot, count)) for slot, count in tokens.items()] for each in self.pools]
        for each, wanted in zip(self.pools, missing, strict=True):
            if (more := sum(count for _, count in wanted)) > each.free:
                raise DataError(
                    f"sequences of {list(tokens.values())[:8]} tokens need {more} more blocks of {self.size} tokens, "
                    f"and {each.free} of {each.count} are free; release sequences, or make the pool larger."
                )
        for each, wanted in zip(self.pools, missing, strict=True):
            for slot, count in wanted:
                if count:
                    each._add(slot, [each._fresh() for _ in range(count)])

    def reserve(self, slot: int, tokens: int) -> bool:
        """Give a slot the pool's own blocks that it lacks to hold so many tokens; return whether enough are free.

        Blocks of layers that see a span come while it runs: of these, there must be as many as it has at a time.
        """
        missing = self.missing(slot, tokens)
        if missing > self.free or any(
            min(span.missing(slot, tokens), span.steady - len(span.tables[slot])) > span.free
            for span in self.spans.values()
        ):
            return False
        self._add(slot, [self._fresh() for _ in range(missing)])
        return True

    def shrink(self, slot: int, tokens: int) -> None:
        """Take back the blocks that a slot does not need to hold so many tokens."""
        for each in self.pools:
            each._cut(slot, tokens)
            if not tokens:
                each.first[slot] = 0

    def slide(self, slot: int, tokens: int) -> None:
        """Take back the blocks of a slot that no layer reads any more, after so many tokens."""
        for span in self.spans.values():
            span.slide(slot, tokens)

    def find(self, tokens: Sequence[int], states: bool = False) -> list[int]:
        """Return the blocks that hold the first tokens of a sequence, as many as it can begin with.

        Layers that see a span must have kept what the next token sees.

        Args:
            tokens: of the sequence.
            states: whether the state at their end must have been kept.
        """
        found = self.prefixes.find(tokens)
        runs = [(span, span.runs(found)) for span in self.spans.values()]
        for count in range(len(found), 0, -1):
            if (not states or found[count - 1] in self.prefixes.snapshots) and all(
                run[count - 1] >= count - span.before(count * self.size) for span, run in runs
            ):
                return found[:count]
        return []

    def share(self, slot: int, blocks: Sequence[int]) -> None:
        """Give a slot without blocks those that were found for its tokens."""
        for block in blocks:
            self._give(block)
        self._add(slot, blocks)
        for span in self.spans.values():
            span.begin(slot, blocks)

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
                self._replace(slot, place, known)
            else:
                # The next pass still writes the slot's own block. No other may be written twice.
                break
            for span in self.spans.values():
                span.put(slot, place, table[place])

    @property
    def _known(self) -> Collection[int]:
        return self.prefixes.blocks

    def _forget(self, block: int) -> None:
        self.prefixes.forget(block)


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
        spans: what is found by these blocks, and forgotten with them.

    Attributes:
        snapshots: the states that are kept.
    """

    def __init__(self, size: int, entries: Iterable[int] = (), spans: Collection[SpanBlocks] = ()) -> None:
        self._size, self._spans = size, spans
        self.snapshots = StateSnapshots(entries)
        self._first: _Parts = {}
        self._parts: dict[int, _BlockTokens] = {}

    @property
    def blocks(self) -> Collection[int]:
        """All that can be found."""
        return self._parts.keys()

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
            for span in self._spans:
                span.forget(block)

    def clear(self) -> None:
        """Let no block be found."""
        self._first, self._parts = {}, {}
        self.snapshots.clear()
        for span in self._spans:
            span.clear()

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

    def __contains__(self, block: int) -> bool:
        """Whether the state at the end of a block is kept."""
        return block in self._kept

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
