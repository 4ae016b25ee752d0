"""Noticing when the gradients of a bucket are complete."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import torch

from megalight.errors import MegalightError
from megalight.imports import has_grad_dtype
from megalight.parallel.data_parallel.buffers import Bucket, land_gradients

log = logging.getLogger(__name__)


class Arrivals:
    """Counts gradients as they arrive, and sends the buckets that are complete while the last micro-batch still runs.

    A parameter's gradient may arrive several times in one micro-batch (tied weights, an op that adds to ``main_grad``
    beside autograd). How often is learned from the micro-batches seen so far.

    Args:
        buckets: they are sent strictly in this order, so that all ranks start the same collectives alike.
        send: starts a bucket's reduction.
        overlap: send before the last micro-batch ends.
        stream: where reductions run; None on the CPU.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        send: Callable[[Bucket], None],
        overlap: bool,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.buckets = buckets
        self.overlap = overlap
        self._send = send
        self._stream = stream
        self._main_stream: torch.cuda.Stream | None = None
        self._sending = False
        self._next = 0
        self._counts = [[0] * len(bucket.infos) for bucket in buckets]
        self._expected = [[0] * len(bucket.infos) for bucket in buckets]
        for index, bucket in enumerate(buckets):
            for place, info in enumerate(bucket.infos):
                reaches_buffer = bucket.grads.dtype == info.parameter.dtype or has_grad_dtype()
                land_gradients(info.parameter, self._on_arrival(index, place), reaches_buffer)

    def begin(self, last: bool) -> None:
        """A micro-batch begins."""
        self._counts = [[0] * len(bucket.infos) for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.arrived = 0
        self._next = 0
        self._sending = last and self.overlap
        if self._stream is not None:
            self._main_stream = torch.cuda.current_stream(self._stream.device)

    def stop(self) -> None:
        """A micro-batch ended, well or not."""
        self._sending = False

    def learn(self) -> None:
        """A micro-batch ended well."""
        first = not any(map(any, self._expected))
        self._expected = [
            [max(pair) for pair in zip(expected, counts, strict=True)]
            for expected, counts in zip(self._expected, self._counts, strict=True)
        ]
        if first and self.overlap:
            self._tell_unused()

    def _tell_unused(self) -> None:
        unused = [
            info.name
            for bucket, expected in zip(self.buckets, self._expected, strict=True)
            for info, count in zip(bucket.infos, expected, strict=True)
            if not count
        ]
        if unused and any(map(any, self._expected)):
            log.info(
                "%d parameters got no gradient in the first micro-batch (%s ...): their buckets and all later ones are "
                "reduced after the backward pass only; freeze what is never used",
                len(unused),
                unused[0],
            )

    def _on_arrival(self, index: int, place: int) -> Callable[[], None]:
        here = weakref.ref(self)  # parameters hold this function where the garbage collector cannot see it

        def arrived() -> None:
            if (alive := here()) is not None:
                alive._count(index, place)

        return arrived

    def _count(self, index: int, place: int) -> None:
        bucket = self.buckets[index]
        if bucket.sent:
            raise MegalightError(
                f"a gradient of {bucket.infos[place].name} arrived after its bucket was reduced. Either this "
                "micro-batch uses it more often than those before it did: switch overlap_grad_reduce off; or a new "
                "step began without zero_grad()."
            )
        if self._stream is not None and (now := torch.cuda.current_stream(self._stream.device)) != self._main_stream:
            self._stream.wait_stream(now)
        self._counts[index][place] += 1
        if self._sending and self._counts[index][place] == self._expected[index][place]:
            bucket.arrived += 1
            while self._next < len(self.buckets) and self._complete(self.buckets[self._next]):
                self._send(self.buckets[self._next])
                self._next += 1

    @staticmethod
    def _complete(bucket: Bucket) -> bool:
        return bucket.arrived == len(bucket.infos)
