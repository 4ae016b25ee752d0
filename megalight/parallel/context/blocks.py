"""Which blocks of a ring a rank computes: for the keys of each share, the queries that see some of them, and these.

A share holds chunks ``r`` and ``2 n - 1 - r`` of each sequence. With a causal mask its queries see, of the keys of
share ``s``:

* ``s = r``: the keys up to themselves, for the places in a share are in order;
* ``s < r``: all queries see the first chunk, which lies before both of theirs, and none the second, which lies after;
* ``s > r``: the second chunk's queries see both of the keys' chunks, the first chunk's none.

So every step but the first is half of a full block on every rank. Without a mask every query sees all keys that are
not padding; padding is at the end of a sequence and therefore of its tokens in a share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from megalight.types import ContextShare, PackedSequences


@dataclass(frozen=True, eq=False)
class Rows:
    """Some tokens of each sequence of a share. Equal rows are the same object.

    Attributes:
        start: the first, where all sequences are equally long.
        count: how many from there on.
        index: ``[n]``, all of them one by one, where sequences differ.
    """

    start: int
    count: int
    index: Tensor | None = None

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """These rows of ``x``, whose tokens lie along ``dim``: a view, or with an index a copy."""
        return x.narrow(dim, self.start, self.count) if self.index is None else x.index_select(dim, self.index)

    def put_(self, x: Tensor, taken: Tensor, dim: int = 1) -> None:
        """Bring back what was taken from ``x`` and changed; a view needs no bringing."""
        if self.index is not None:
            x.index_copy_(dim, self.index, taken)

    def add_(self, x: Tensor, part: Tensor, dim: int = 1) -> None:
        """Add ``part`` to these rows of ``x``."""
        if self.index is None:
            x.narrow(dim, self.start, self.count).add_(part)
        else:
            x.index_add_(dim, self.index, part.to(x.dtype))


@dataclass(frozen=True, eq=False)
class Block:
    """The queries that see keys of one share, and these keys.

    Attributes:
        queries: of this share.
        keys: of the other.
        sequences: how they divide where sequences differ, for :func:`megalight.ops.attention_block.block_attention`.
        causal: as many keys as queries, of which each sees those up to itself.
        all_queries: every query of the share is among them.
    """

    queries: Rows
    keys: Rows
    sequences: PackedSequences | None
    causal: bool
    all_queries: bool


@dataclass(frozen=True, eq=False)
class Blocks:
    """A rank's blocks in the order of the ring's steps, in which the keys of shares ``r, r - 1, ...`` come by.

    Attributes:
        batch: rows into which a share's tokens fold: its sequences where these are equally long, else 1.
        steps: one per share; None where no query sees a key.
    """

    batch: int
    steps: tuple[Block | None, ...]


def blocks_of(sequences: PackedSequences, causal: bool) -> Blocks:
    """The blocks of this rank's share of ``sequences``, worked out once for all layers."""
    share = sequences.context
    assert share is not None
    return share.once(("ring", causal), _blocks, sequences, share, causal)


def _blocks(sequences: PackedSequences, share: ContextShare, causal: bool) -> Blocks:
    equal = sequences.uniform is not None and (causal or len(set(share.real_lengths)) == 1)
    make = _dense if equal else _packed
    steps = []
    for step in range(share.size):
        source = (share.rank - step) % share.size
        stretches = [
            _stretch(length, real, share.rank, source, share.size, causal)
            for length, real in zip(sequences.lengths, share.real_lengths, strict=True)
        ]
        steps.append(make(sequences, stretches, causal and step == 0))
    return Blocks(len(sequences.lengths) if equal else 1, tuple(steps))


def _stretch(length: int, real: int, rank: int, source: int, size: int, causal: bool) -> tuple[int, int]:
    """In a sequence of which a share has ``length`` tokens: the first query that sees keys, and how many keys."""
    chunk = length // 2
    if not causal:
        return 0, sum(min(chunk, max(0, real - place * chunk)) for place in (source, 2 * size - 1 - source))
    if source < rank:
        return 0, chunk
    return (0 if source == rank else chunk), length


@lru_cache(maxsize=256)
def _slice(start: int, count: int) -> Rows:
    return Rows(start, count)


def _dense(sequences: PackedSequences, stretches: Sequence[tuple[int, int]], causal: bool) -> Block | None:
    length, (start, keys) = sequences.lengths[0], stretches[0]
    return Block(_slice(start, length - start), _slice(0, keys), None, causal, start == 0) if keys else None


def _packed(sequences: PackedSequences, stretches: Sequence[tuple[int, int]], causal: bool) -> Block | None:
    lengths, device = sequences.lengths, sequences.device
    offsets = (0, *accumulate(lengths))
    seen = [place for place, (_, keys) in enumerate(stretches) if keys]
    if not seen:
        return None
    queries = [(offsets[place] + stretches[place][0], offsets[place + 1]) for place in seen]
    keys = [(offsets[place], offsets[place] + stretches[place][1]) for place in seen]
    packed = PackedSequences.of_lengths([stop - start for start, stop in queries], device)
    if queries != keys:
        packed = replace(packed, keys=PackedSequences.of_lengths([stop - start for start, stop in keys], device))
    rows = _index(tuple(queries), offsets[-1], device)
    return Block(rows, _index(tuple(keys), offsets[-1], device), packed, causal, rows.count == offsets[-1])


@lru_cache(maxsize=16)
def _index(stretches: tuple[tuple[int, int], ...], total: int, device: torch.device) -> Rows:
    """Stretches of a packed tensor of ``total`` rows."""
    count = sum(stop - start for start, stop in stretches)
    if count == total:
        return _slice(0, total)
    index = torch.cat([torch.arange(start, stop) for start, stop in stretches])
    index = index.pin_memory() if device.type == "cuda" else index  # so that the host need not wait for the copy
    return Rows(0, count, index.to(device, non_blocking=True))
