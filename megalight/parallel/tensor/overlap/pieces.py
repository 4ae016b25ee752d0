"""Choose the number of pieces of a product, with a model of the time that product and messages take together.

More pieces expose less communication, but use the multiprocessors less well: output tiles are computed in waves of one
tile per multiprocessor, and the last wave of each piece is partly empty. The constants were measured on H200 GPUs. All
ranks must get the same answer, so the model does not query the device.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

MULTIPROCESSORS = 132
TILE_ROWS, TILE_COLUMNS = 128, 256
"""Size of the output tile of a large half-precision product."""
TAIL = 0.15
"""Fraction of a wave that a product leaves empty. cuBLAS picks tiles by size; four pieces take 3 to 12 % longer."""
FLOPS = 667e12
"""Half-precision operations per second of all multiprocessors together."""
LINK = 330e9
"""Bytes per second that a rank sends and receives within a host."""
LATENCY = 1e-5
"""Seconds per message in addition to its bytes."""
MOST = 8
"""Largest number of pieces without sequence parallelism; with it, tp is the limit."""


def product_seconds(rows: int, inner: int, width: int) -> float:
    """Return the time of one product ``[rows, inner] x [inner, width]``."""
    tail = TAIL * MULTIPROCESSORS * TILE_ROWS * TILE_COLUMNS
    # A multiply-add counts as two operations. The tail is work that the hardware is blocked for without using it.
    return 2.0 * (rows * width + tail) * inner / FLOPS


def message_seconds(messages: int, rows: int, width: int, itemsize: int) -> float:
    """Return the time of messages of ``[rows, width]``, one after another."""
    return messages * (rows * width * itemsize / LINK + LATENCY)


def gather_seconds(pieces: int, tp: int, rows: int, inner: int, width: int, itemsize: int) -> float:
    """Return the time of products of arriving blocks, the own block first; ``rows`` are those of one rank's share."""
    run = tp // pieces
    message = rows * inner * itemsize / LINK + _latency(pieces, tp)
    clock = 0.0
    for block in range(pieces):
        # Blocks come in the order of rounds over one link; the own share, which is in the
        # first, needs no message.
        arrived = ((block + 1) * run - 1) * message
        # A product starts when its operands are there and the product before it has ended.
        clock = max(clock, arrived) + product_seconds(run * rows, inner, width)
    return clock


def scatter_seconds(pieces: int, tp: int, rows: int, inner: int, width: int, itemsize: int) -> float:
    """Return the time if each block's sums are sent while the next block is computed, the own block last."""
    run = tp // pieces
    message = rows * width * itemsize / LINK + _latency(pieces, tp)
    clock = link = 0.0
    for block in range(pieces):
        clock += product_seconds(run * rows, inner, width)
        # Sums leave when they are computed and the link is free. A rank's own part needs no message.
        link = max(link, clock) + (run - (block == pieces - 1)) * message
    return max(clock, link)


def _latency(pieces: int, tp: int) -> float:
    """Return the latency of each message. With one piece, a single collective brings all shares."""
    return LATENCY / (tp - 1) if pieces == 1 and tp > 1 else LATENCY


def reduce_seconds(pieces: int, tp: int, rows: int, inner: int, width: int, itemsize: int) -> float:
    """Return the time if each piece is all-reduced while the next one is computed; ``rows`` is their total number."""
    clock = link = 0.0
    edges = [rows * piece // pieces for piece in range(pieces + 1)]
    for start, stop in pairwise(edges):
        clock += product_seconds(stop - start, inner, width)
        # A ring all-reduce moves each byte twice, less the rank's own part.
        link = max(link, clock) + LATENCY + 2 * (tp - 1) / tp * (stop - start) * width * itemsize / LINK
    return link


WAYS = {"gather": gather_seconds, "scatter": scatter_seconds, "reduce": reduce_seconds}


# Cached, because every layer asks in every pass, and sizes repeat.
@lru_cache(maxsize=1024)
def best_pieces(way: str, tp: int, rows: int, inner: int, width: int, itemsize: int) -> int:
    """Return the fastest number of pieces; the smallest one if several are equal.

    Args:
        way: ``"gather"``, ``"scatter"``, or ``"reduce"``.
        tp: number of ranks that share the layer.
        rows: rows of one rank's share; for ``"reduce"``, all rows.
        inner: features that the product sums over, on this rank.
        width: features of its result, on this rank.
        itemsize: bytes of an element.
    """
    counts = range(1, MOST + 1) if way == "reduce" else [n for n in range(1, tp + 1) if tp % n == 0]
    # Under sequence parallelism a piece holds the tokens of whole ranks, so the number must divide tp.
    # Of equal times the smallest number: fewer launches for the host.
    return min(counts, key=lambda pieces: (WAYS[way](pieces, tp, rows, inner, width, itemsize), pieces))
