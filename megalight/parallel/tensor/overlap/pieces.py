"""Into how many products one is cut: a model of the time that product and messages take together.

More pieces leave less communication exposed, and fill the multiprocessors worse: output tiles come in waves of one tile
per multiprocessor, and each piece's last wave is partly empty. Numbers were measured on H200s; all ranks must come to
the same answer, so nothing is asked of the device.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

MULTIPROCESSORS = 132
TILE_ROWS, TILE_COLUMNS = 128, 256
"""Of the output tile of a large half-precision product."""
TAIL = 0.15
"""Of a wave that a product leaves empty: cuBLAS picks tiles by size, and four pieces take 3 to 12 % longer than one."""
FLOPS = 667e12
"""Half-precision products per second, all multiprocessors together."""
LINK = 330e9
"""Bytes per second that a rank sends, and receives, within a host."""
LATENCY = 1e-5
"""Seconds that a message takes beside its bytes."""
MOST = 8
"""Pieces at most without sequence parallelism, where the ranks set no limit."""


def product_seconds(rows: int, inner: int, width: int) -> float:
    """One product ``[rows, inner] x [inner, width]``."""
    tail = TAIL * MULTIPROCESSORS * TILE_ROWS * TILE_COLUMNS
    return 2.0 * (rows * width + tail) * inner / FLOPS


def gather_seconds(pieces: int, tp: int, rows: int, inner: int, width: int, itemsize: int) -> float:
    """Products of blocks as they arrive, the own one first; ``rows`` are those of one rank's share."""
    run = tp // pieces
    message = rows * inner * itemsize / LINK + _latency(pieces, tp)
    clock = 0.0
    for block in range(pieces):
        arrived = ((block + 1) * run - 1) * message
        clock = max(clock, arrived) + product_seconds(run * rows, inner, width)
    return clock


def scatter_seconds(pieces: int, tp: int, rows: int, inner: int, width: int, itemsize: int) -> float:
    """Each block's sums leave while the next one is computed, the own block last."""
    run = tp // pieces
    message = rows * width * itemsize / LINK + _latency(pieces, tp)
    clock = link = 0.0
    for block in range(pieces):
        clock += product_seconds(run * rows, inner, width)
        link = max(link, clock) + (run - (block == pieces - 1)) * message
    return max(clock, link)


def _latency(pieces: int, tp: int) -> float:
    """Of each message. One collective brings all shares where there is one piece."""
    return LATENCY / (tp - 1) if pieces == 1 and tp > 1 else LATENCY


def reduce_seconds(pieces: int, tp: int, rows: int, inner: int, width: int, itemsize: int) -> float:
    """Each piece is all-reduced while the next one is computed; ``rows`` are all there are."""
    clock = link = 0.0
    edges = [rows * piece // pieces for piece in range(pieces + 1)]
    for start, stop in pairwise(edges):
        clock += product_seconds(stop - start, inner, width)
        link = max(link, clock) + LATENCY + 2 * (tp - 1) / tp * (stop - start) * width * itemsize / LINK
    return link


WAYS = {"gather": gather_seconds, "scatter": scatter_seconds, "reduce": reduce_seconds}


@lru_cache(maxsize=1024)
def best_pieces(way: str, tp: int, rows: int, inner: int, width: int, itemsize: int) -> int:
    """How many pieces take least; the fewest of several that do.

    Args:
        way: ``"gather"``, ``"scatter"``, or ``"reduce"``.
        tp: ranks that share the layer.
        rows: of one rank's share; of ``"reduce"``, all.
        inner: features that the product sums over, on this rank.
        width: features of its result, on this rank.
        itemsize: bytes of an element.
    """
    counts = range(1, MOST + 1) if way == "reduce" else [n for n in range(1, tp + 1) if tp % n == 0]
    return min(counts, key=lambda pieces: (WAYS[way](pieces, tp, rows, inner, width, itemsize), pieces))
