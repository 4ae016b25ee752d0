"""Which blocks hold the beginnings of texts. Texts that begin equally find, and share, them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megalight.inference.snapshots import Snapshots


@dataclass(eq=False)
class _Part:
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


_Parts = dict[tuple[int, ...], _Part]


class Prefixes:
    """Full blocks, by the tokens in them and in all blocks before: a tree with a part of a text in each node.

    What a layer keeps of a token follows from this token and those before it. So a block may serve all texts with these
    tokens. Tokens themselves are compared, not a hash of them. Each sequence of tokens has at most one block.

    Args:
        size: tokens of a block.
        entries: for states at the ends of blocks.

    Attributes:
        snapshots: the states that are kept.
    """

    def __init__(self, size: int, entries: Iterable[int] = ()) -> None:
        self._size = size
        self.snapshots = Snapshots(entries)
        self._first: _Parts = {}
        self._parts: dict[int, _Part] = {}

    def __contains__(self, block: int) -> bool:
        """Whether the block can be found."""
        return block in self._parts

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Return the blocks that hold the first tokens of a text, as many as there are."""
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
        part = _Part(block, tuple(tokens), siblings)
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
