"""Detect when all gradients of a bucket have arrived."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megalight.errors import MegalightError
from megalight.ops.parameter import state_of
from megalight.parallel.data_parallel.buffers import Bucket
from megalight.parallel.data_parallel.landing import land_gradients
from megalight.parallel.data_parallel.streams import SideStream

log = logging.getLogger(__name__)


class Arrivals:
    """Counts arriving gradients, and sends complete buckets while the last backward passes still run.

    A parameter's gradient may arrive several times per micro-batch (tied weights, or an op that adds to ``main_grad``
    beside autograd). The engine learns the usual number from the steps seen so far. Only the total over all
    micro-batches is compared, so backward passes may run in any order and in parts (pipelines, delayed weight
    gradients).

    Args:
        buckets: sent strictly in this order, because all ranks must start their collectives in the same order.
        send: starts a bucket's reduction.
        overlap: send buckets before the last micro-batch ends.
        stream: that of the reductions; None on the CPU.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        send: Callable[[Bucket], None],
        overlap: bool,
        stream: SideStream | None,
    ) -> None:
        self.buckets = buckets
        self.overlap = overlap
        self._send = send
        self._stream = stream
        self._sending = False
        self._next = 0
        self._micro_batches = 0
        self._noted: list[tuple[int, int]] | None = None
        self._counts = [[0] * len(bucket.infos) for bucket in buckets]
        self._usual = [[0] * len(bucket.infos) for bucket in buckets]
        """The largest number of arrivals per micro-batch seen so far, per bucket and parameter."""
        for index, bucket in enumerate(buckets):
            for place, (parameter, main_grad) in enumerate(bucket.main_grads):
                arrived, announced = self._on_arrival(index, place), self._on_announcement(index, place)
                land_gradients(parameter, main_grad, arrived, announced, bucket.autograd_adds)

    def begin(self, micro_batches: int, send: bool) -> None:
        """Begin the passes of ``micro_batches`` micro-batches; ``send``: they are the last before the reduction."""
        # Counted per call: the gradients of one call are compared with its number of micro-batches.
        self._counts = [[0] * len(bucket.infos) for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.arrived = 0
        self._next = 0
        self._micro_batches = micro_batches
        self._sending = send and self.overlap
        if self._stream is not None:
            self._stream.begin()

    def stop(self) -> None:
        """End the passes, also after an error."""
        self._sending = False

    @contextmanager
    def noting(self) -> Iterator[list[tuple[int, int]]]:
        """Record arrivals inside the block as ``(bucket, place)`` instead of counting them."""
        self._noted = []
        try:
            yield self._noted
        finally:
            self._noted = None

    def learn(self) -> None:
        """Update the usual numbers of arrivals, after passes that ended without an error."""
        # Nothing is sent early before something was learned: a bucket that seems
        # complete might get a second gradient.
        first = not any(map(any, self._usual))
        # Rounded up: arrivals may be spread unevenly over micro-batches.
        self._usual = [
            [max(usual, -(-count // self._micro_batches)) for usual, count in zip(*rows, strict=True)]
            for rows in zip(self._usual, self._counts, strict=True)
        ]
        if first and self.overlap:
            self._tell_unused()

    def _tell_unused(self) -> None:
        unused = [
            info.name
            for bucket, usual in zip(self.buckets, self._usual, strict=True)
            for info, count in zip(bucket.infos, usual, strict=True)
            if not count
        ]
        if unused and any(map(any, self._usual)):
            log.info(
                "%d parameters got no gradient in the first step (%s ...): their buckets and all later ones are "
                "reduced after the backward passes only; freeze what is never used",
                len(unused),
                unused[0],
            )

    def _on_arrival(self, index: int, place: int) -> Callable[[], None]:
        here = weakref.ref(self)  # a hook of a parameter holds this closure: a strong reference would leak the engine

        def arrived() -> None:
            if (alive := here()) is not None:
                alive.count(index, place)

        return arrived

    def _on_announcement(self, index: int, place: int) -> Callable[[], None]:
        here = weakref.ref(self)

        def announced() -> None:
            if (alive := here()) is None:
                return
            info = alive.buckets[index].infos[place]
            # Adding to old values would give a wrong gradient without a sign.
            if state_of(info.parameter).untouched:
                raise MegalightError(
                    f"an op added to main_grad of {info.name} without asking whether its gradient is the first one of "
                    "the step, which is written. Let it use megalight.ops.parameter.add_gradient, or "
                    "ParameterState.touch."
                )
            alive.count(index, place)

        return announced

    def count(self, index: int, place: int) -> None:
        """Count one gradient, and send every bucket that is now complete and next in order."""
        # The pass is being recorded. Its gradients do not exist yet; each replay reports them.
        if self._noted is not None:
            self._noted.append((index, place))
            return
        bucket = self.buckets[index]
        if bucket.sent:
            raise MegalightError(
                f"a gradient of {bucket.infos[place].name} arrived after its bucket was reduced. Either this step "
                "uses it more often than those before it did: switch overlap_grad_reduce off; or a new step began "
                "without zero_grad()."
            )
        # A gradient computed on another stream must be finished before the reduction stream reads the buffer.
        if self._stream is not None:
            self._stream.follow()
        self._counts[index][place] += 1
        if self._sending and self._counts[index][place] == self._usual[index][place] * self._micro_batches:
            bucket.arrived += 1
            # A complete bucket waits for those before it: all ranks must start the same collectives in the same order.
            while self._next < len(self.buckets) and self._complete(self.buckets[self._next]):
                self._send(self.buckets[self._next])
                self._next += 1

    @staticmethod
    def _complete(bucket: Bucket) -> bool:
        return bucket.arrived == len(bucket.infos)
