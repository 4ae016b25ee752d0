"""A product in pieces, each computed during the messages of the next. A carrier moves the bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.parallel.collectives import Pending, check_divides, start_all_reduce
from megalight.parallel.tensor.overlap.pieces import best_pieces
from megalight.parallel.tensor.overlap.plain import Plain
from megalight.parallel.tensor.overlap.rounds import Own, Round, rounds_of
from megalight.parallel.tensor.overlap.spec import OverlapSpec, Product


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

    def gather(self, share: Tensor, rounds: tuple[Round, ...], own: Own) -> Gathering:
        """Start to gather all shares ``[n, h]``."""
        ...

    def scatter(self, rows: int, width: int, like: Tensor, rounds: tuple[Round, ...]) -> Scattering:
        """Prepare to receive partial sums of ``rows`` rows per rank, with the dtype and device of ``like``."""
        ...


class Pipelined(Plain):
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

    def start_product_scatter(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> Pending:
        """Send each block's sums while the next block is computed, the own block last."""
        check_divides(x, self.group, dim)
        flat, back = as_rows(x, dim)
        # If the caller has work that hides the collective, cutting the product would only cost efficiency.
        pieces = 1 if covered else self.pieces_of("scatter", len(flat) // self.group.size(), product, flat)
        if pieces == 1:
            return super().start_product_scatter(x, product, dim, covered=covered)
        leaving = self.scatter_in_pieces(flat, product, pieces)
        return Pending(None, lambda: back(leaving.finish()))

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

    def start_product_reduce(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> Pending:
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

        return Pending(None, finish)

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
