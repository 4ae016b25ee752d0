"""Which pairs of chunks see each other where a query sees only near keys: windows, and chunks of attention (Llama 4).

A sequence has ``2 n`` chunks of ``length`` tokens, of which a rank holds two. Below, queries are those of chunk ``q``,
and keys are those of chunk ``k <= q``. Their distance is ``q - k`` chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Band(NamedTuple):
    """Queries and keys of two chunks that see each other.

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
