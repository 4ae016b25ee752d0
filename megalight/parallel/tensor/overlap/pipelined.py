"""A product in pieces, each under the messages of the next: order here, how bytes travel is a carrier's matter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.parallel.collectives import Pending, check_divides, start_all_reduce
from megalight.parallel.tensor.overlap.pieces import best_pieces
from megalight.parallel.tensor.overlap.plain import Plain
from megalight.parallel.tensor.overlap.rounds import Round, rounds_of
from megalight.parallel.tensor.overlap.spec import OverlapSpec, Product


def pieces_why_not(spec: OverlapSpec) -> str | None:
    """Pieces are formed by plain products, and written where they belong."""
    if spec.low_precision:
        return "has no products in 8 or 4 bits, whose scales may span all rows; plain has"
    if spec.autocast:
        return "has no autocast: its products have the type of their operands"
    if spec.dtype not in (None, spec.weight_dtype):
        return f"needs inputs of the weight's type, {spec.weight_dtype}, not {spec.dtype}"
    return None


class Gathering(Protocol):
    """Shares under way to this rank."""

    whole: Tensor
    """``[tp * n, h]``: all shares in rank order, each valid once its round has been waited for."""

    def wait(self, number: int) -> None:
        """Until the shares of a round are here; on a GPU the current stream waits, not the host."""
        ...


class Scattering(Protocol):
    """Partial sums under way to the ranks that own their rows."""

    own: Tensor
    """``[n, w]``: where this rank's own partial sum belongs."""

    def send(self, number: int, piece: Tensor) -> None:
        """A round's piece ``[run * n, w]`` is computed: start to send its rows, but own ones, to their owners."""
        ...

    def finish(self) -> Tensor:
        """The sum ``[n, w]`` of what has arrived and of :attr:`own`."""
        ...


class Carrier(Protocol):
    """Moves shares between the ranks of one host or several."""

    def gather(self, share: Tensor, rounds: tuple[Round, ...], *, place_own: bool) -> Gathering:
        """Start to bring all shares ``[n, h]`` here; the own one too where ``place_own``."""
        ...

    def scatter(self, rows: int, width: int, like: Tensor, rounds: tuple[Round, ...]) -> Scattering:
        """Be ready for partial sums of ``rows`` rows per rank, of the type and device of ``like``."""
        ...


class Pipelined(Plain):
    """Pieces are the tokens of neighbouring ranks, so that they and their results lie whole in memory.

    Where a product is not worth cutting it is done the plain way; so is what the caller covers with other work.

    Args:
        group: the ranks.
        carrier: moves shares between them.
        pieces: of every product; None: by its sizes.
    """

    def __init__(self, group: ProcessGroup, carrier: Carrier, pieces: int | None) -> None:
        super().__init__(group)
        self.carrier = carrier
        self.pieces = pieces

    def gather_product(self, share: Tensor, product: Product, dim: int, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """The own share is multiplied while the others travel, each block as it arrives."""
        flat, back = as_rows(share, dim)
        pieces = self.pieces_of("gather", len(flat), product, flat)
        if pieces == 1:
            return super().gather_product(share, product, dim, keep=keep)
        y, whole = self.gather_in_pieces(flat, product, pieces, keep=keep)
        return back(y), back(whole) if keep else None

    def gather_in_pieces(self, share: Tensor, product: Product, pieces: int, *, keep: bool) -> tuple[Tensor, Tensor]:
        """``[n, inner] -> [tp * n, width]``, and all shares; the own one is among them where ``keep``."""
        rank, size, rows = self.group.rank(), self.group.size(), len(share)
        rounds = rounds_of(rank, size, pieces)
        alone = pieces == size  # the first product needs no message at all
        arriving = self.carrier.gather(share, rounds, place_own=keep or not alone)
        y = share.new_empty(size * rows, product.width)
        block = size // pieces * rows
        for number, each in enumerate(rounds):
            arriving.wait(number)
            part = slice(each.block * block, (each.block + 1) * block)
            product.call(share if alone and number == 0 else arriving.whole[part], y[part])
        return y, arriving.whole

    def start_product_scatter(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> Pending:
        """Each block's sums leave while the next one is computed, the own block last."""
        check_divides(x, self.group, dim)
        flat, back = as_rows(x, dim)
        pieces = 1 if covered else self.pieces_of("scatter", len(flat) // self.group.size(), product, flat)
        if pieces == 1:
            return super().start_product_scatter(x, product, dim, covered=covered)
        leaving = self.scatter_in_pieces(flat, product, pieces)
        return Pending(None, lambda: back(leaving.finish()))

    def scatter_in_pieces(self, x: Tensor, product: Product, pieces: int) -> Scattering:
        """``[tp * n, inner]``, on its way to sums ``[n, width]``."""
        rank, size = self.group.rank(), self.group.size()
        rounds, run, rows = rounds_of(rank, size, pieces), size // pieces, len(x) // size
        leaving = self.carrier.scatter(rows, product.width, x, rounds)
        for number in (*range(1, pieces), 0):
            first = rounds[number].block * run * rows
            part = x[first : first + run * rows]
            if number == 0 and run == 1:
                product.call(part, leaving.own)
                continue
            piece = product.call(part, None)
            leaving.send(number, piece)
            if number == 0:
                leaving.own.copy_(piece[rank % run * rows :][:rows])
        return leaving

    def start_product_reduce(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> Pending:
        """Each piece of rows, even or not, is all-reduced while the next one is computed."""
        flat, back = as_rows(x, dim)
        pieces = 1 if covered else min(len(flat), self.pieces_of("reduce", len(flat), product, flat))
        if pieces <= 1:
            return super().start_product_reduce(x, product, dim, covered=covered)
        y = flat.new_empty(len(flat), product.width)
        edges = [len(flat) * piece // pieces for piece in range(pieces + 1)]
        sums = []
        for start, stop in pairwise(edges):
            product.call(flat[start:stop], y[start:stop])
            sums.append(start_all_reduce(y[start:stop], self.group))

        def finish() -> Tensor:
            for each in sums:
                each.wait()
            return back(y)

        return Pending(None, finish)

    def pieces_of(self, way: str, rows: int, product: Product, x: Tensor) -> int:
        """Asked for, or best for a product of these sizes."""
        if self.pieces is not None:
            return self.pieces
        return best_pieces(way, self.group.size(), rows, product.inner, product.width, x.element_size())


def as_rows(x: Tensor, dim: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """``x`` as rows ``[n, features]``, those of one place along ``dim`` together; and the way back, for any ``n``."""
    moved = x.movedim(dim, 0)
    between = moved.shape[1:-1]

    def back(rows: Tensor) -> Tensor:
        return rows.view(-1, *between, rows.shape[-1]).movedim(0, dim).contiguous()

    return moved.contiguous().view(-1, x.shape[-1]), back
