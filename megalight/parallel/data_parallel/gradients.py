"""The gradient side of the engine: main gradients, summed over micro-batches and then over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import MegalightError
from megalight.imports import has_grad_dtype
from megalight.parallel.data_parallel.arrivals import Arrivals
from megalight.parallel.data_parallel.buffers import Bucket
from megalight.parallel.data_parallel.first_writes import FirstWrites
from megalight.parallel.data_parallel.norm import counted_runs, global_norm
from megalight.parallel.data_parallel.reduce import PartialReducer, Reducer
from megalight.parallel.trace import span


class MainGradients:
    """Gradients in the buckets' buffers, from the first one of a step to the reduced ones that the optimizer reads.

    Besides the engine, whoever replays recorded passes comes here: :meth:`noting` and :meth:`arrive` for some modules,
    :meth:`adopt` and :meth:`give_up` for all the passes of a step.

    Args:
        buckets: in the order in which they are sent.
        everyone: all ranks of the run, for the norm; None for one.
        scatter: each rank needs the sums of its own interval only.
        reduce_dtype, reduction: see :class:`~megalight.parallel.data_parallel.reduce.Reducer`.
        overlap: send buckets while the last backward passes run.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        everyone: ProcessGroup | None,
        device: torch.device,
        *,
        scatter: bool,
        reduce_dtype: torch.dtype | None,
        reduction: str,
        overlap: bool,
    ) -> None:
        self.buckets = buckets
        self.device = device
        self._reducer = Reducer(scatter, reduce_dtype, reduction)
        self._partial = PartialReducer(buckets, device)
        self._everyone = everyone
        self._counted = [counted_runs(bucket.shard) for bucket in buckets]
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and any(bucket.group is not None for bucket in buckets):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pending: list[Callable[[], Tensor]] = []
        self._scaler: Callable[[Tensor], None] | None = None
        self._reduced = False
        self._any_dtype = False
        self._first = FirstWrites(buckets)
        self._arrivals = Arrivals(buckets, self._send, overlap, self._stream)

    # ---------------------------------------------------------------- one step

    def zero(self) -> None:
        """Forget what there is, and be ready for the micro-batches of another step."""
        self._reduced = False
        self._wait()  # only where a step was given up halfway
        self._unsend()
        self._first.begin()

    @contextmanager
    def passes(self, micro_batches: int, reduce: bool) -> Iterator[None]:
        """Around the passes of so many micro-batches; ``reduce``: no more follow before :meth:`finish`."""
        self._arrivals.begin(micro_batches, reduce)
        try:
            yield
        finally:
            self._arrivals.stop()
        self._arrivals.learn()
        self._first.end()

    def finish(self) -> None:
        """Reduce what was not reduced yet, wait for all of it, and set ``shard.master.grad``; once a step."""
        if self._reduced:
            return
        self._reduced = True
        self._first.end()
        for bucket in self.buckets:
            if not bucket.sent:
                self._send(bucket)
        with torch.no_grad():
            gradients = self._wait()
            self._partial(gradients)
            for bucket, gradient in zip(self.buckets, gradients, strict=True):
                master = bucket.shard.master
                master.grad = gradient if self._any_dtype else gradient.to(master.dtype)

    @property
    def first(self) -> bool:
        """Whether no passes have ended since :meth:`zero`: gradients are written first, and added later only."""
        return self._first.wanted

    @property
    def reduced(self) -> bool:
        """Whether :meth:`finish` has run since the last :meth:`zero`."""
        return self._reduced

    @property
    def values(self) -> list[Tensor]:
        """The reduced gradients of the shards, as :meth:`finish` left them.

        Raises:
            MegalightError: they are not reduced yet.
        """
        gradients = [bucket.shard.master.grad for bucket in self.buckets]
        if any(gradient is None for gradient in gradients):
            raise MegalightError("gradients are not reduced yet; call finish_grad_sync() first.")
        return [gradient for gradient in gradients if gradient is not None]

    def norm(self) -> Tensor:
        """The L2 norm of the reduced gradients of the whole model: 0-dim, on the device, equal on every rank."""
        views = [
            gradient[start:stop]
            for gradient, runs in zip(self.values, self._counted, strict=True)
            for start, stop in runs
        ]
        return global_norm(views, self._everyone, self.device)

    @torch.no_grad()
    def scale(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by a 0-dim tensor on the device."""
        if self._scaler is not None:
            self._scaler(factor)
        elif self.buckets:
            torch._foreach_mul_(self.values, factor)

    def scale_by(self, scaler: Callable[[Tensor], None]) -> None:
        """Leave :meth:`scale` to an optimizer, which also takes gradients in whatever dtype they were summed in."""
        self._scaler = scaler
        if has_grad_dtype():
            self._any_dtype = True
            for bucket in self.buckets:
                bucket.shard.master.grad_dtype = None

    # ---------------------------------------------------------------- passes that were recorded

    @contextmanager
    def noting(self) -> Iterator[list[tuple[int, int]]]:
        """Inside, gradients that arrive are noted down in the list and not counted: :meth:`arrive` counts them later.

        For passes that are recorded now and replayed then.
        """
        with self._arrivals.noting() as seen:
            yield seen

    def places_of(self, parameters: Iterable[nn.Parameter]) -> list[tuple[int, int]]:
        """By which ``(bucket, place)`` :meth:`noting` and :meth:`arrive` know these parameters."""
        wanted = {id(parameter) for parameter in parameters}
        return [
            (index, place)
            for index, bucket in enumerate(self.buckets)
            for place, info in enumerate(bucket.infos)
            if id(info.parameter) in wanted
        ]

    def arrive(self, seen: Sequence[tuple[int, int]]) -> None:
        """Count gradients whose arrival nobody else tells of: complete buckets are sent off."""
        for index, place in seen:
            self._arrivals.count(index, place)

    def only_add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Have all gradients of these added, to zeros at first: what is recorded once for all passes cannot do both."""
        self._first.leave_out(parameters)

    def adopt(self, gradients: Sequence[Tensor] | None) -> None:
        """Be as passes leave it that somebody else (a replayed graph) ran.

        Args:
            gradients: what they were reduced into; None: they were not.
        """
        self._first.skip()
        if gradients is None:
            return
        self._reduced = True
        for bucket, gradient in zip(self.buckets, gradients, strict=True):
            bucket.sent = True
            bucket.shard.master.grad = gradient

    def give_up(self, first: bool) -> None:
        """Be as before passes of which nothing reached the device; sums of earlier ones stay.

        Args:
            first: what :attr:`first` was before them.
        """
        self._arrivals.stop()
        self._pending = []
        self._reduced = False
        self._unsend()
        if first:
            self._first.begin()

    # ---------------------------------------------------------------- sending

    def _send(self, bucket: Bucket) -> None:
        bucket.sent = True
        with torch.no_grad():
            self._first.complete(bucket)
            if self._stream is None:
                with span("reduce_gradients", elements=bucket.layout.numel):
                    self._pending.append(self._reducer.start(bucket))
                return
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream), span("reduce_gradients", elements=bucket.layout.numel):
                reduced = self._reducer.start(bucket)()
            self._pending.append(lambda: reduced)

    def _wait(self) -> list[Tensor]:
        gradients = [finish() for finish in self._pending]
        self._pending = []
        if gradients and self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return gradients

    def _unsend(self) -> None:
        for bucket in self.buckets:
            bucket.sent = False
            bucket.shard.master.grad = None
