"""The attention blocks that a rank of the ring computes: for each share, which queries see which of its keys.

Share ``r`` of ``n`` holds chunks ``r`` and ``2 n - 1 - r`` of each sequence (zigzag). With a causal mask, its queries
see these keys of share ``s``:

* ``s = r``: a query sees the keys up to itself, because positions in a share are in order.
* ``s < r``: all queries see the first chunk, which lies before both of theirs, and not the second, which lies after.
* ``s > r``: queries of the second chunk see both chunks; queries of the first chunk see none.

So every step except the first is half of a full block on every rank. Without a mask, every query sees all keys that are
not padding. Padding is at the end of a sequence, and so at the end of its tokens in a share.

With a window, or chunks of attention, most pairs of chunks do not see each other and have no block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.types import ContextShare, PackedSequences


class Band(NamedTuple):
    """Queries and keys of two chunks that see each other.

    A sequence has ``2 n`` chunks of ``length`` tokens, of which a rank holds two. Below, queries are those of chunk
    ``q``, and keys are those of chunk ``k <= q``. Their distance is ``q - k`` chunks.

    Attributes:
        queries: range of queries, from the beginning of their chunk.
        keys: range of keys, from the beginning of theirs. There are as many keys as queries if a mask is needed.
        causal: whether query ``i`` sees no key after key ``i``.
        window: query ``i`` sees no key before key ``i - window``. None: all.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    window: int | None


def bands(q: int, k: int, length: int, window: int | None, chunk: int | None) -> Iterator[Band]:
    """Yield what queries of chunk ``q`` see of the keys of chunk ``k``; no query is in two bands.

    Args:
        q: number of the queries' chunk.
        k: number of the keys' chunk.
        length: tokens of each.
        window: number of earlier tokens that a query sees besides itself.
        chunk: a query sees only keys of its own ``chunk`` tokens, counted from the beginning of the sequence.
    """
    if k > q or not length:
        return
    if window is not None:
        yield from _window(q - k, length, window)
    else:
        assert chunk is not None
        yield from _chunk(q * length, k * length, length, chunk)


def _window(distance: int, length: int, window: int) -> Iterator[Band]:
    if distance == 0:
        yield Band((0, length), (0, length), True, window)
        return
    # `distance - 1` chunks lie between keys and queries. With each further query, one key less is seen.
    seen = min(length, window - (distance - 1) * length)
    if seen > 0:
        # As many queries as keys: query i sees key j if j >= i - left.
        left = max(0, window - distance * length)
        yield Band((0, seen), (length - seen, length), False, None if left >= seen - 1 else left)


def _chunk(first: int, key: int, length: int, chunk: int) -> Iterator[Band]:
    begin = first // chunk * chunk
    if first == key:
        for start in range(begin, first + length, chunk):
            rows = max(start, first) - first, min(start + chunk, first + length) - first
            yield Band(rows, rows, True, None)
    elif begin < key + length:
        # Only the chunk that the first query is in begins before the keys end.
        yield Band((0, min(begin + chunk - first, length)), (max(begin - key, 0), length), False, None)


@dataclass(frozen=True, eq=False)
class TokenSelection:
    """A selection of the tokens of a share. Equal selections are the same object, so they can be compared by identity.

    Attributes:
        start: the first token of each sequence, if all sequences are equally long.
        count: number of tokens from ``start`` on.
        index: ``[n]``: the index of every token, if sequences differ in length.
    """

    start: int
    count: int
    index: Tensor | None = None

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Select these tokens of ``x`` along ``dim``: a view, or a copy if there is an index."""
        return x.narrow(dim, self.start, self.count) if self.index is None else x.index_select(dim, self.index)

    def put_(self, x: Tensor, taken: Tensor, dim: int = 1) -> None:
        """Write tokens from :meth:`take` back after they were changed. Views are already written."""
        if self.index is not None:
            # An index made copies in `take`, so what was changed there must be written back; a
            # view changed its origin.
            x.index_copy_(dim, self.index, taken)

    def add_(self, x: Tensor, part: Tensor) -> None:
        """Add ``part`` to these tokens of ``x``, along dim 1."""
        if self.index is None:
            x.narrow(1, self.start, self.count).add_(part)
        else:
            # Accumulates in the dtype of the total: parts come in the dtype of the inputs.
            x.index_add_(1, self.index, part.to(x.dtype))


@dataclass(frozen=True, eq=False)
class Block:
    """The queries of this rank that see keys of one share, and these keys.

    Attributes:
        queries: the queries, of this rank's share.
        keys: the keys, of the other share.
        sequences: how packed tokens divide, for :func:`megalight.ops.attention_block.block_attention`. None: dense.
        causal: whether query ``i`` sees only keys up to ``i``; there are then as many keys as queries.
        all_queries: whether all queries of the share take part.
        window: query ``i`` sees no key before key ``i - window``; there are then as many keys as queries. None: all.
    """

    queries: TokenSelection
    keys: TokenSelection
    sequences: PackedSequences | None
    causal: bool
    all_queries: bool
    window: int | None = None


@dataclass(frozen=True, eq=False)
class RingBlocks:
    """The blocks of a rank in the order of the ring's steps: keys of shares ``r, r - 1, ...`` arrive one after another.

    Attributes:
        batch: batch size to view the share's tokens with: the number of sequences if they are equally long, else 1.
        steps: the blocks of each share: none if no query sees a key of it, several if masks differ. The first block
            of the first step is the only one that may have all queries, each of which sees itself.
    """

    batch: int
    steps: tuple[tuple[Block, ...], ...]


def blocks_of(
    sequences: PackedSequences, causal: bool, window: int | None = None, chunk: int | None = None
) -> RingBlocks:
    """Return the blocks of this rank's share, computed once for all layers.

    Args:
        sequences: this rank's share.
        causal: whether a query sees no later key.
        window: number of earlier tokens that a query sees besides itself; for causal masks. None: all.
        chunk: a query sees only keys of its own chunk of so many tokens; for causal masks. None: all.
    """
    share = sequences.context
    assert share is not None
    # Cached on the share, whose sequences all layers have; the pattern depends on the mask alone.
    if window is None and chunk is None:
        return share.once(("ring", causal), _blocks, sequences, share, causal)
    return share.once(("ring", window, chunk), _limited, sequences, share, window, chunk)


def _blocks(sequences: PackedSequences, share: ContextShare, causal: bool) -> RingBlocks:
    # Equal lengths allow dense kernels, which are faster, and views instead of copies by index.
    equal = sequences.uniform is not None and (causal or len(set(share.real_lengths)) == 1)
    make = _dense if equal else _packed
    steps = []
    for step in range(share.size):
        # Keys travel to the next rank, so after s steps this rank has those of the rank s before it.
        source = (share.rank - step) % share.size
        stretches = [
            _stretch(length, real, share.rank, source, share.size, causal)
            for length, real in zip(sequences.lengths, share.real_lengths, strict=True)
        ]
        block = make(sequences, stretches, causal and step == 0)
        steps.append(() if block is None else (block,))
    return RingBlocks(len(sequences.lengths) if equal else 1, tuple(steps))


def _stretch(length: int, real: int, rank: int, source: int, size: int, causal: bool) -> tuple[int, int]:
    """For a sequence with ``length`` tokens per share, return the first query that sees keys, and how many keys."""
    chunk = length // 2
    if not causal:
        # Real tokens of the two chunks; padding at the end of the sequence is no key.
        return 0, sum(min(chunk, max(0, real - place * chunk)) for place in (source, 2 * size - 1 - source))
    if source < rank:
        return 0, chunk
    return (0 if source == rank else chunk), length


def _limited(sequences: PackedSequences, share: ContextShare, window: int | None, chunk: int | None) -> RingBlocks:
    """Return the blocks under a window or chunks: always packed, as no dense kernel has their masks."""
    offsets = (0, *accumulate(sequences.lengths))
    mine = share.rank, 2 * share.size - 1 - share.rank
    steps = []
    for step in range(share.size):
        source = (share.rank - step) % share.size
        theirs = source, 2 * share.size - 1 - source
        # One kernel has one mask. And no key twice in a block, or sums of gradients would depend on their order; so
        # pairs of different chunks have blocks of their own. The first pairs are those of chunks with themselves.
        groups: dict[tuple[int, bool, int | None], list[tuple[tuple[int, int], tuple[int, int]]]] = {}
        for (place, length), (i, q), (j, k) in product(
            enumerate(sequences.lengths), enumerate(mine), enumerate(theirs)
        ):
            half = length // 2
            for band in bands(q, k, half, window, chunk):
                pair = 0 if q == k else 1 + 2 * i + j
                rows, keys = (
                    (offsets[place] + side * half + start, offsets[place] + side * half + stop)
                    for side, (start, stop) in ((i, band.queries), (j, band.keys))
                )
                groups.setdefault((pair, band.causal, band.window), []).append((rows, keys))
        blocks = []
        for (_, causal, width), pairs in sorted(groups.items(), key=lambda group: group[0][0]):
            rows_of, keys_of = [rows for rows, _ in pairs], [keys for _, keys in pairs]
            blocks.append(_block(sequences, rows_of, keys_of, causal, width))
        steps.append(tuple(blocks))
    return RingBlocks(1, tuple(steps))


# The same object for the same numbers, as `_Taken` compares by identity.
@lru_cache(maxsize=256)
def _slice(start: int, count: int) -> TokenSelection:
    return TokenSelection(start, count)


def _dense(sequences: PackedSequences, stretches: Sequence[tuple[int, int]], causal: bool) -> Block | None:
    length, (start, keys) = sequences.lengths[0], stretches[0]
    return Block(_slice(start, length - start), _slice(0, keys), None, causal, start == 0) if keys else None


def _packed(sequences: PackedSequences, stretches: Sequence[tuple[int, int]], causal: bool) -> Block | None:
    # Queries and keys of a sequence take part only together, or kernels would pair wrong neighbors.
    offsets = (0, *accumulate(sequences.lengths))
    seen = [place for place, (_, keys) in enumerate(stretches) if keys]
    if not seen:
        return None
    queries = [(offsets[place] + stretches[place][0], offsets[place + 1]) for place in seen]
    keys = [(offsets[place], offsets[place] + stretches[place][1]) for place in seen]
    return _block(sequences, queries, keys, causal)


def _block(
    sequences: PackedSequences,
    queries: Sequence[tuple[int, int]],
    keys: Sequence[tuple[int, int]],
    causal: bool,
    window: int | None = None,
) -> Block:
    """Return the packed block in which each range of queries sees the range of keys beside it."""
    total, device = sum(sequences.lengths), sequences.device
    packed = PackedSequences.of_lengths([stop - start for start, stop in queries], device)
    # The same lengths on both sides are plain self-attention, for which more kernels serve.
    if queries != keys:
        packed = replace(packed, keys=PackedSequences.of_lengths([stop - start for start, stop in keys], device))
    rows = _index(tuple(queries), total, device)
    return Block(rows, _index(tuple(keys), total, device), packed, causal, rows.count == total, window)


@lru_cache(maxsize=16)
def _index(stretches: tuple[tuple[int, int], ...], total: int, device: torch.device) -> TokenSelection:
    """Return the selection of these ranges of a packed tensor with ``total`` tokens."""
    count = sum(stop - start for start, stop in stretches)
    if count == total:
        return _slice(0, total)
    index = torch.cat([torch.arange(start, stop) for start, stop in stretches])
    index = index.pin_memory() if device.type == "cuda" else index  # so that the host does not wait for the copy
    return TokenSelection(0, count, index.to(device, non_blocking=True))
