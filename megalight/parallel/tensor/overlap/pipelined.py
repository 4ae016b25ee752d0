"""Pipelined overlap: a GEMM in pieces, each computed during the communication of the next.

First the cost model that chooses the number of pieces, then the overlap, then the carrier of point-to-point messages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.parallel.collectives import PendingCollective, check_divides, start_all_reduce
from megalight.parallel.tensor.overlap.spec import ExchangeRound, NoOverlap, OverlapSpec, Own, Product, rounds_of

NUM_SMS = 132
TILE_ROWS, TILE_COLUMNS = 128, 256
"""Size of the output tile of a large half-precision product."""
TAIL = 0.15
"""Fraction of a wave that a product leaves empty. cuBLAS picks tiles by size; four pieces take 3 to 12 % longer."""
FLOPS = 667e12
"""Half-precision operations per second of all SMs together."""
LINK = 330e9
"""Bytes per second that a rank sends and receives within a host."""
LATENCY = 1e-5
"""Seconds per message in addition to its bytes."""
MOST = 8
"""Largest number of pieces without sequence parallelism; with it, tp is the limit."""


def product_seconds(rows: int, inner: int, width: int) -> float:
    """Return the time of one product ``[rows, inner] x [inner, width]``.

    More pieces expose less communication, but use the SMs less well: output tiles are computed in waves of one tile
    per SM, and the last wave of each piece is partly empty. The constants were measured on H200 GPUs. All ranks
    must get the same answer, so the model does not query the device.
    """
    tail = TAIL * NUM_SMS * TILE_ROWS * TILE_COLUMNS
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


COLLECTIVE_SECONDS = {"gather": gather_seconds, "scatter": scatter_seconds, "reduce": reduce_seconds}


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
    return min(counts, key=lambda pieces: (COLLECTIVE_SECONDS[way](pieces, tp, rows, inner, width, itemsize), pieces))


def pieces_why_not(spec: OverlapSpec) -> str | None:
    """Return why a layer cannot be cut into pieces: pieces are plain products, written directly to their place."""
    if spec.low_precision:
        return "has no products in 8 or 4 bits, because their scales may span all rows; plain has them"
    if spec.autocast:
        return "does not support autocast: its products have the dtype of their operands"
    if spec.dtype not in (None, spec.weight_dtype):
        return f"needs inputs of the weight's dtype, {spec.weight_dtype}, not {spec.dtype}"
    return None


class Gathering(Protocol):
    """Shares on their way to this rank."""

    whole: Tensor
    """``[tp * n, h]``: all shares in rank order; each of another rank is valid after the wait for its round."""

    def wait(self, number: int) -> None:
        """Wait for the shares of a round; on a GPU the current stream waits, not the host."""
        ...

    def finish(self) -> None:
        """Wait, after the last round, until all of ``whole`` is valid and the own share may be written again."""
        ...


class Scattering(Protocol):
    """Partial sums on their way to the ranks that own their rows."""

    def place(self) -> Tensor:
        """Return memory ``[n, w]`` for this rank's own partial sum, which must be written before :meth:`finish`."""
        ...

    def keep(self, own: Tensor) -> None:
        """Take this rank's own partial sum ``[n, w]``, instead of :meth:`place`; it must not change any more."""
        ...

    def send(self, number: int, piece: Tensor) -> None:
        """Start to send a round's finished piece ``[run * n, w]`` to the owners of its rows, without own rows."""
        ...

    def finish(self) -> Tensor:
        """Return the sum ``[n, w]`` of the received parts and the own one."""
        ...


class Carrier(Protocol):
    """Moves shares between the ranks."""

    def gather(self, share: Tensor, rounds: tuple[ExchangeRound, ...], own: Own) -> Gathering:
        """Start to gather all shares ``[n, h]``."""
        ...

    def scatter(self, rows: int, width: int, like: Tensor, rounds: tuple[ExchangeRound, ...]) -> Scattering:
        """Prepare to receive partial sums of ``rows`` rows per rank, with the dtype and device of ``like``."""
        ...


class Pipelined(NoOverlap):
    """Cuts products into pieces. A piece holds the tokens of neighboring ranks, so it is contiguous in memory.

    If it does not pay to cut a product, or the caller covers the collective with other work, it works like ``plain``.

    Args:
        group: the ranks.
        carrier: moves shares between them.
        pieces: number of pieces of every product; None: chosen by its sizes.
    """

    def __init__(self, group: ProcessGroup, carrier: Carrier, pieces: int | None) -> None:
        super().__init__(group)
        self.carrier = carrier
        self.pieces = pieces

    def gather_product(self, share: Tensor, product: Product, dim: int, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Multiply the own share while the others are on their way, then each block as it arrives."""
        # Rows with tokens first, so that blocks of ranks are ranges of rows; a copy only if
        # tokens are not the first dim.
        flat, back = as_rows(share, dim)
        pieces = self.pieces_of("gather", len(flat), product, flat)
        if pieces == 1:
            return super().gather_product(share, product, dim, keep=keep)
        y, whole = self.gather_in_pieces(flat, product, pieces, keep=keep)
        return back(y), back(whole) if keep else None

    def gather_in_pieces(
        self,
        share: Tensor,
        product: Product,
        pieces: int,
        *,
        keep: bool,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> tuple[Tensor, Tensor]:
        """``[n, inner] -> [tp * n, width]``, and all shares; these include the own share if ``keep``.

        ``meanwhile`` is called when the messages have started, before the first product.
        """
        rank, size, rows = self.group.rank(), self.group.size(), len(share)
        rounds = rounds_of(rank, size, pieces)
        alone = pieces == size  # then the first product needs only the own share, and no message
        own: Own = "early" if not alone else "late" if keep else "absent"
        arriving = self.carrier.gather(share, rounds, own)
        meanwhile()
        y = share.new_empty(size * rows, product.width)
        block = size // pieces * rows
        for number, each in enumerate(rounds):
            # The current stream waits, and only for this round: later shares go on arriving during the product.
            arriving.wait(number)
            part = slice(each.block * block, (each.block + 1) * block)
            product.call(share if alone and number == 0 else arriving.whole[part], y[part])
        # After the last product, which runs while the own share still leaves.
        arriving.finish()
        return y, arriving.whole

    def start_product_scatter(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> PendingCollective:
        """Send each block's sums while the next block is computed, the own block last."""
        check_divides(x, self.group, dim)
        flat, back = as_rows(x, dim)
        # If the caller has work that hides the collective, cutting the product would only cost efficiency.
        pieces = 1 if covered else self.pieces_of("scatter", len(flat) // self.group.size(), product, flat)
        if pieces == 1:
            return super().start_product_scatter(x, product, dim, covered=covered)
        leaving = self.scatter_in_pieces(flat, product, pieces)
        return PendingCollective(None, lambda: back(leaving.finish()))

    def scatter_in_pieces(self, x: Tensor, product: Product, pieces: int) -> Scattering:
        """Start the product of ``[tp * n, inner]`` and its reduction to sums ``[n, width]``."""
        rank, size = self.group.rank(), self.group.size()
        rounds, run, rows = rounds_of(rank, size, pieces), size // pieces, len(x) // size
        leaving = self.carrier.scatter(rows, product.width, x, rounds)
        # Other ranks' blocks come first, so that they travel early; the own block needs no message if run is 1.
        for number in (*range(1, pieces), 0):
            first = rounds[number].block * run * rows
            part = x[first : first + run * rows]
            # Written straight to its place: with one rank per block, nothing of the own block is for others.
            if number == 0 and run == 1:
                product.call(part, leaving.place())
                continue
            piece = product.call(part, None)
            leaving.send(number, piece)
            if number == 0:
                # The own rows of the own block stay here; the rest of the block has just been sent.
                leaving.keep(piece[rank % run * rows :][:rows])
        return leaving

    def start_product_reduce(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> PendingCollective:
        """All-reduce each piece of rows while the next one is computed; pieces may differ in size."""
        flat, back = as_rows(x, dim)
        # Not more pieces than rows: a piece without rows would be an empty collective.
        pieces = 1 if covered else min(len(flat), self.pieces_of("reduce", len(flat), product, flat))
        if pieces <= 1:
            return super().start_product_reduce(x, product, dim, covered=covered)
        y = flat.new_empty(len(flat), product.width)
        edges = [len(flat) * piece // pieces for piece in range(pieces + 1)]
        sums = []
        for start, stop in pairwise(edges):
            product.call(flat[start:stop], y[start:stop])
            # Rows are contiguous, so each piece is a buffer of its own for the collective; features would not be.
            sums.append(start_all_reduce(y[start:stop], self.group))

        def finish() -> Tensor:
            for each in sums:
                each.wait()
            return back(y)

        return PendingCollective(None, finish)

    def pieces_of(self, way: str, rows: int, product: Product, x: Tensor) -> int:
        """Return the requested number of pieces, or the best one for these sizes."""
        if self.pieces is not None:
            return self.pieces
        return best_pieces(way, self.group.size(), rows, product.inner, product.width, x.element_size())


def as_rows(x: Tensor, dim: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """View ``x`` as rows ``[n, features]``, ordered by ``dim`` first; the second result maps any ``n`` rows back."""
    moved = x.movedim(dim, 0)
    between = moved.shape[1:-1]

    def back(rows: Tensor) -> Tensor:
        return rows.view(-1, *between, rows.shape[-1]).movedim(0, dim).contiguous()

    # Tokens first: then a rank's share, and a block of ranks, is one contiguous range of rows.
    return moved.contiguous().view(-1, x.shape[-1]), back


class Messages:
    """A carrier that uses messages; all messages of a call are posted in the order in which they are needed.

    Args:
        group: the ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def gather(self, share: Tensor, rounds: tuple[ExchangeRound, ...], own: Own) -> GatheringMessages:
        """Start to gather all shares."""
        return GatheringMessages(self.group, share, rounds, own != "absent")

    def scatter(self, rows: int, width: int, like: Tensor, rounds: tuple[ExchangeRound, ...]) -> ScatteringMessages:
        """Prepare to receive partial sums."""
        return ScatteringMessages(self.group, like.new_empty(self.group.size(), rows, width), rounds)


class GatheringMessages:
    """A gather whose messages are all posted at the beginning."""

    def __init__(self, group: ProcessGroup, share: Tensor, rounds: tuple[ExchangeRound, ...], place_own: bool) -> None:
        self.share = share  # keeps the memory until it has been sent
        self.whole = share.new_empty(group.size() * len(share), *share.shape[1:])
        shares = self.whole.view(group.size(), *share.shape)
        # All ranks post the messages of a round in the same order. With another order, two ranks could each wait in a
        # send whose receiver has posted another one.
        self.works = [
            [exchange(group, share, behind, shares[ahead], ahead) for ahead, behind in each.pairs] for each in rounds
        ]
        if place_own:
            # After the messages are posted, so that they start first.
            shares[group.rank()].copy_(share)

    def wait(self, number: int) -> None:
        """Wait for the shares of a round, and until own ones have left."""
        wait(self.works[number])

    def finish(self) -> None:
        """Do nothing: the rounds have waited for everything."""


class ScatteringMessages:
    """Partial sums, ordered by sender."""

    def __init__(self, group: ProcessGroup, parts: Tensor, rounds: tuple[ExchangeRound, ...]) -> None:
        self.group = group
        self.parts = parts
        self.rounds = rounds
        self.works: list[list[dist.Work]] = []
        self.leaving: list[Tensor] = []

    def place(self) -> Tensor:
        """Return the place of the own part."""
        return self.parts[self.group.rank()]

    def keep(self, own: Tensor) -> None:
        """Copy the own part to its place."""
        self.place().copy_(own)

    def send(self, number: int, piece: Tensor) -> None:
        """Start to send the rows of a piece, and to receive as many."""
        run, rows = self.group.size() // len(self.rounds), self.parts.shape[1]
        by_owner = piece.view(run, rows, -1)
        for ahead, behind in self.rounds[number].pairs:
            self.works.append(exchange(self.group, by_owner[ahead % run], ahead, self.parts[behind], behind))
        self.leaving.append(piece)  # keeps the memory until it has been sent

    def finish(self) -> Tensor:
        """Wait, and sum the parts in at least float32."""
        wait(self.works)
        self.leaving.clear()
        # In the order of ranks, not of arrival: every rank, and every run, adds in the same order.
        return torch.sum(self.parts, 0)


def exchange(group: ProcessGroup, leaving: Tensor, to: int, arriving: Tensor, source: int) -> list[dist.Work]:
    """Start to send one tensor and to receive another; ``to`` and ``source`` are ranks within the group."""
    send = dist.P2POp(dist.isend, leaving, group=group, group_peer=to)
    receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=source)
    works: list[dist.Work] = dist.batch_isend_irecv([send, receive])
    return works


def wait(works: list[list[dist.Work]]) -> None:
    """Wait for messages to finish; on a GPU the current stream waits, not the host."""
    for each in works:
        for work in each:
            work.wait()
