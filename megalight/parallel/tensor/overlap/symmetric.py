"""Shares copied between GPUs of one host by copy engines, through symmetric memory, without using SMs.

Products stay on the current stream; copies run on a stream of their own. Each rank pushes: its share into the slots of
all ranks that gather, and each partial sum into the slot of the rank that owns its rows. Flags signal that data has
arrived, and that a slot may be written again (:mod:`megalight.parallel.peers`). The current stream waits for arrivals
between products. The copy stream never waits for work that peers have not yet launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.ops.common import HALF
from megalight.ops.linear import queue_for
from megalight.ops.parameter import do_nothing, state_of
from megalight.ops.sum_terms import sum_terms
from megalight.parallel.collectives import PendingCollective, check_divides
from megalight.parallel.peers import driver, memory, spin
from megalight.parallel.peers.memory import Flag, PeerMemory, PeerSlot
from megalight.parallel.peers.spin import PeerCopyStream, Watch
from megalight.parallel.tensor.overlap.pipelined import (
    Pipelined,
    as_rows,
    message_seconds,
    pieces_why_not,
    product_seconds,
)
from megalight.parallel.tensor.overlap.spec import ExchangeRound, NoOverlap, OverlapSpec, Own, Product, rounds_of


class Waiting:
    """The weight gradient of one backward pass that waits, if there is one.

    Nothing in a backward pass needs a weight gradient, and it is one of the longest products of a layer. A message
    that its own layer cannot hide (the gather before the short product of an attention's projection, for example)
    travels under the weight gradient of the layer that came before.

    Attributes:
        seconds: how long it takes on the device.
        compute: computes it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.compute: Callable[[], Any] | None = None

    @torch.no_grad()
    def run(self) -> None:
        """Compute it."""
        compute, self.seconds, self.compute = self.compute, 0.0, None
        if compute is not None:
            compute()


class Cover:
    """Keeps at most one weight gradient of a backward pass waiting, so that little memory waits with it.

    What still waits at the end of the backward pass is computed there. If the pass fails, it is dropped.
    """

    def __init__(self) -> None:
        # Weak: autograd holds them until the pass has ended or failed. By pass, as one may run inside of another.
        self._passes: WeakValueDictionary[int, Waiting] = WeakValueDictionary()
        self._bare = 0.0

    @property
    def seconds(self) -> float:
        """How long the weight gradient takes that waits; 0: none does."""
        return 0.0 if (waiting := self._current()) is None else waiting.seconds

    def run(self) -> float:
        """Compute what waits, and return how long that takes on the device: call it when a message has started."""
        seconds = self.seconds
        if (waiting := self._current()) is not None:
            waiting.run()
        return seconds

    def under(self, seconds: float) -> None:
        """Compute what waits under a message of ``seconds``, and the next one that is put off if that is too short."""
        self._bare = seconds - self.run()

    def put_off(self, seconds: float, compute: Callable[[], Any]) -> None:
        """Let a weight gradient wait, or compute it now if a message travels that nothing covers yet.

        Args:
            seconds: how long it takes on the device.
            compute: computes it, and adds it to the weight's main gradient.
        """
        bare, self._bare = self._bare, 0.0
        self.run()  # the older one first: it holds memory, and a weight's gradients are summed in the order of passes
        if bare > 0:
            compute()
            return
        waiting = self._current()
        if waiting is None:
            waiting = self._passes[_number()] = Waiting()
            torch.autograd.Variable._execution_engine.queue_callback(waiting.run)
        waiting.seconds, waiting.compute = seconds, compute

    def _current(self) -> Waiting | None:
        return self._passes.get(_number())


def _number() -> int:
    """Return the number of the backward pass that runs, or -1."""
    return torch._C._current_graph_task_id()


LEAST_BYTES = 1 << 20
"""Smallest share in bytes. Smaller ones use ``plain``: flags and copies take longer to start than a collective."""

SLOTS = 3
"""Slots of each memory. Two hold gathered inputs of weight gradients that are to come, and the third is filled.

With three, peers have freed a slot before this rank gets there: each has sent it something since.
"""


def why_not(spec: OverlapSpec) -> str | None:
    """Return why a layer cannot be served: it needs GPUs that share memory, and plain half-precision products."""
    if (reason := memory.why_not(spec.device)) is not None:
        return reason
    if not spec.sequence_parallel:
        return "needs sequence parallelism; without it, pipelined overlaps the all-reduce"
    if spec.weight_dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.weight_dtype}"
    if spec.group is not None and (reason := memory.unreachable(spec.group)) is not None:
        return reason
    return pieces_why_not(spec)


class Symmetric(Pipelined):
    """Cuts products into pieces like ``pipelined``; copy engines also do the copies that the caller covers with work.

    Args:
        group: ranks of one host.
        pieces: number of pieces of every product; None: chosen by its sizes.
    """

    carrier: PeerCopies

    def __init__(self, group: ProcessGroup, pieces: int | None) -> None:
        super().__init__(group, PeerCopies(group), pieces)
        self.cover = Cover()

    def start_gather(self, share: Tensor, dim: int) -> PendingCollective:
        """Start the copies, which run until the caller waits."""
        # With one round, as the caller waits for all shares at once.
        if share.nbytes < LEAST_BYTES:
            return super().start_gather(share, dim)
        flat, back = as_rows(share, dim)
        arriving = self.carrier.gather(flat, rounds_of(self.group.rank(), self.group.size(), 1), "late")

        def finish() -> Tensor:
            arriving.wait(0)
            arriving.finish()
            return self._whole(arriving.whole, back)

        return PendingCollective(None, finish)

    def gather_product(self, share: Tensor, product: Product, dim: int, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Multiply pieces as the shares arrive, or all at once under a weight gradient; small shares use ``plain``."""
        if share.nbytes < LEAST_BYTES:
            # Small shares skip the slots, whose flags and copies would take longer than the bytes.
            return NoOverlap.gather_product(self, share, product, dim, keep=keep)
        flat, back = as_rows(share, dim)
        if self.cover.seconds and self.cover.seconds >= self._seconds(len(flat), flat.shape[1], flat.itemsize):
            gathering = self.start_gather(share, dim)
            self.cover.run()
            gathered = gathering.wait()
            y = product.call(gathered, None)
            if not keep:
                self.done(gathered)
            return y, gathered if keep else None
        pieces = self.pieces_of("gather", len(flat), product, flat)
        y, whole = self.gather_in_pieces(flat, product, pieces, keep=keep, meanwhile=self.cover.run)
        # The product has read the slot, and peers may write there again.
        if not keep:
            self.done(whole)
        return back(y), self._whole(whole, back) if keep else None

    def _whole(self, rows: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
        """Return gathered rows in the layout of the share; the slot is released if that needed a copy."""
        whole = back(rows)
        if whole.data_ptr() != rows.data_ptr():
            self.done(rows)
        return whole

    def hold(self, whole: Tensor) -> Tensor:
        """Return a copy if the shares lie in a slot."""
        if whole.data_ptr() not in self.carrier.open:
            return whole
        # A slot must be free again soon, or its peers wait: what is kept for the backward is copied out.
        copy = whole.clone()
        self.done(whole)
        return copy

    def done(self, whole: Tensor) -> None:
        """Let peers write into the slot again."""
        if (slot := self.carrier.open.pop(whole.data_ptr(), None)) is not None:
            self.carrier.free(slot)

    def start_product_scatter(self, x: Tensor, product: Product, dim: int, *, covered: bool) -> PendingCollective:
        """Send in pieces, or all at once if the caller covers the copies; small ones use ``plain``."""
        check_divides(x, self.group, dim)
        flat, back = as_rows(x, dim)
        rows = len(flat) // self.group.size()
        if rows * product.width * x.itemsize < LEAST_BYTES:
            return NoOverlap.start_product_scatter(self, x, product, dim, covered=covered)
        # The caller covers the copies, so cutting would only make the product slower.
        pieces = 1 if covered else self.pieces_of("scatter", rows, product, flat)
        leaving = self.scatter_in_pieces(flat, product, pieces)
        if covered:
            self.cover.under(self._seconds(rows, product.width, x.itemsize))
        return PendingCollective(None, lambda: back(leaving.finish()))

    def restart(self) -> None:
        """Begin with the first slots of the peers again."""
        self.carrier.restart()

    def put_off(self, weight: Tensor, rows: int, compute: Callable[[], Tensor | None]) -> Tensor | None:
        """Let the gradient wait for the next message, if it goes into a main gradient that may get it later."""
        state = state_of(weight)
        # Gradients of units are reduced when the unit's backward pass ends, and other queues have their own order.
        if state.main_grad is None or state.expect_late is not do_nothing or queue_for(weight) is not None:
            return compute()
        self.cover.put_off(product_seconds(weight.shape[0], rows, weight.shape[1]), compute)
        return None

    def _seconds(self, rows: int, width: int, itemsize: int) -> float:
        """Return how long messages of ``[rows, width]`` to all peers take."""
        return message_seconds(self.group.size() - 1, rows, width, itemsize)


class PeerCopies(PeerCopyStream):
    """A carrier that uses copy engines.

    Args:
        group: ranks of one host.

    Attributes:
        open: slots with gathered shares that are still to be read, by the address of the shares.
        watch: notes peers that have not pushed within the timeout of the group. The next call then raises.

    Raises:
        MegalightError: at a call: in an earlier one, a peer was missing.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        # Two memories: a gather and a scatter run at the same time in the backward, and neither
        # must wait for the other.
        self.shares, self.sums = PeerMemory(group, SLOTS), PeerMemory(group, SLOTS)
        self.watch = Watch(self.shares, also=self.sums)
        self.open: dict[int, PeerSlot] = {}

    def restart(self) -> None:
        """Begin with the first slots again, on all ranks together, while nothing is gathered."""
        self.open.clear()
        self.shares.restart()
        self.sums.restart()

    def await_ready(self, slot: PeerSlot, peers: Iterable[int]) -> None:
        """Let the current stream wait until peers have pushed, or are known to be gone.

        Wait for own copies after this, never before: they may wait for a peer that is gone, and this wait ends that.
        """
        spin.wait_with(self.watch, slot.flags(Flag.READY, peers), slot.memory)

    def gather(self, share: Tensor, rounds: tuple[ExchangeRound, ...], own: Own) -> GatheringCopies:
        """Start to gather all shares."""
        self.watch.check()
        return GatheringCopies(self, share, rounds, own)

    def scatter(self, rows: int, width: int, like: Tensor, rounds: tuple[ExchangeRound, ...]) -> ScatteringCopies:
        """Prepare to receive partial sums."""
        self.watch.check()
        return ScatteringCopies(self, (rows, width), like, rounds)


class GatheringCopies:
    """A gather in which each rank pushes its share into a slot of every other rank."""

    def __init__(self, carrier: PeerCopies, share: Tensor, rounds: tuple[ExchangeRound, ...], own: Own) -> None:
        rank, size, shape = carrier.shares.rank, carrier.shares.size, tuple(share.shape)
        self.carrier, self.rounds = carrier, rounds
        self.share = share  # keeps the memory until it has been copied
        self.slot = carrier.shares.slot(size * share.nbytes, {slot.place for slot in carrier.open.values()})
        carrier.stream.wait_stream(torch.cuda.current_stream())  # the share must be computed before it is copied
        carrier.await_free(self.slot)
        for each in rounds:
            for _, behind in each.pairs:
                place = self.slot.view(behind, shape, share.dtype, rank * share.numel())
                carrier.push(self.slot, behind, (place, share))
        self.whole = self.slot.view(rank, (size * shape[0], *shape[1:]), share.dtype)
        carrier.open[self.whole.data_ptr()] = self.slot
        place = self.whole.view(size, *shape)[rank]
        if own == "early":
            place.copy_(share)
        elif own == "late":
            # Behind the pushes, so that products do not wait for a copy on their own stream.
            driver.copy(carrier.stream, place, share)
        # The share leaves with this event: until then its memory must not be written again.
        self.left = carrier.stream.record_event()

    def wait(self, number: int) -> None:
        """Let the current stream wait for a round's shares."""
        self.carrier.await_ready(self.slot, [ahead for ahead, _ in self.rounds[number].pairs])

    def finish(self) -> None:
        """Let the current stream wait, after all rounds, for the copies of the own share."""
        torch.cuda.current_stream().wait_event(self.left)


class ScatteringCopies:
    """A scatter in which each rank pushes partial sums into the slots of the ranks that own their rows."""

    def __init__(
        self, carrier: PeerCopies, shape: tuple[int, int], like: Tensor, rounds: tuple[ExchangeRound, ...]
    ) -> None:
        self.carrier, self.shape, self.like, self.rounds = carrier, shape, like, rounds
        self.rank, self.size = carrier.sums.rank, carrier.sums.size
        self.slot = carrier.sums.slot((self.size - 1) * prod(shape) * like.itemsize)
        self.own: Tensor | None = None
        self.leaving: list[Tensor] = []

    def place(self) -> Tensor:
        """Return memory for the own part. Only the parts of peers lie in the slot."""
        self.own = self.like.new_empty(*self.shape)
        return self.own

    def keep(self, own: Tensor) -> None:
        """Take the own part where it is."""
        self.own = own

    def send(self, number: int, piece: Tensor) -> None:
        """Start to push the rows of a piece."""
        run = self.size // len(self.rounds)
        by_owner = piece.view(run, *self.shape)
        self.carrier.stream.wait_stream(torch.cuda.current_stream())
        # Once for the slot: the flags are lowered by the wait, and a second one would never end.
        if not self.leaving:
            self.carrier.await_free(self.slot)
        for ahead, _ in self.rounds[number].pairs:
            # The owner has a row for each of its peers, in the order of ranks.
            row = self.rank - (self.rank > ahead)
            place = self.slot.view(ahead, self.shape, self.like.dtype, row * prod(self.shape))
            self.carrier.push(self.slot, ahead, (place, by_owner[ahead % run]))
        self.left = self.carrier.stream.record_event()
        self.leaving.append(piece)  # freed after the current stream has waited for the copies

    def finish(self) -> Tensor:
        """Wait until all peers have pushed, and sum in the order of ranks; float32 is used for accumulation."""
        self.carrier.await_ready(self.slot, self.slot.memory.others)
        own, self.own = self.own, None
        assert own is not None, "the own part was neither written nor given"
        size, dtype = prod(self.shape), self.like.dtype
        rows = [self.slot.view(self.rank, self.shape, dtype, row * size) for row in range(self.size - 1)]
        total = own.new_empty(*self.shape)
        sum_terms(total, own, rows, self.rank)
        self.carrier.free(self.slot)
        # The pieces are read by copies; their memory may be reused only after these.
        torch.cuda.current_stream().wait_event(self.left)
        self.leaving.clear()
        return total
