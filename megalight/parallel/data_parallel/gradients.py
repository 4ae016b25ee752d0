"""The gradient side of the engine: main gradients, summed over micro-batches and then over ranks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import MegalightError
from megalight.imports import has_grad_dtype
from megalight.ops.parameter import state_of
from megalight.parallel.data_parallel.buffers import Bucket
from megalight.parallel.data_parallel.communication import SideStream, side_stream
from megalight.parallel.data_parallel.grad_hooks import (
    FirstWrites,
    GradReadyCounter,
    UnusedParameters,
    register_grad_hook,
)
from megalight.parallel.data_parallel.grad_norm import global_norm
from megalight.parallel.data_parallel.reduce import PartialReducer, Reducer
from megalight.parallel.trace import capturing, span


class UnitGradients:
    """Lends the gradient buffers to one unit after the other, and adds up the sums of ranks in each rank's shard.

    Schedules that put weight gradients off open a unit twice for a micro-batch. The few gradients of the first time
    (norms, biases) are deferred, and are summed over ranks with those of the second.

    Args:
        buckets: the buckets of units.
        stream: that of the reductions; None on the CPU.

    Attributes:
        recording: a pass is being recorded, which has no effect yet: arriving gradients are no error.
    """

    def __init__(self, buckets: Sequence[Bucket], reducer: Reducer, stream: SideStream | None) -> None:
        self.buckets = buckets
        self._reducer = reducer
        self._stream = stream
        self._of: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            assert bucket.layout.kind.unit is not None
            self._of.setdefault(bucket.layout.kind.unit, []).append(bucket)
        self._first = {unit: FirstWrites(own) for unit, own in self._of.items()}
        self._busy: dict[int, list[Callable[[], object]]] = {}
        """Address of a buffer -> what to wait for before another unit can use it."""
        self._summed: set[Bucket] = set()
        self._open: int | None = None
        self._finished = False
        self._put_off: Counter[int] = Counter()
        """Unit -> gradients that will come after its backward pass."""
        self._came_late = False
        """Some of these came since the unit was opened."""
        self._deferred: dict[int, list[tuple[Bucket, nn.Parameter, Tensor, Tensor]]] = {}
        """Unit -> gradients that wait for these: bucket, parameter, place in the buffer, copy."""
        self.recording = False
        for bucket in buckets:
            for info, (parameter, main_grad) in zip(bucket.infos, bucket.main_grads, strict=True):
                arrived = self._on_grad_ready(bucket, info.name)
                register_grad_hook(parameter, main_grad, arrived, arrived, bucket.autograd_adds)
                state = state_of(parameter)
                state.expect_late, state.begin_late = self._on_put_off(bucket), self._on_late(bucket)

    def begin(self) -> None:
        """Begin a step: the shards hold old sums, and no unit is open."""
        # Reductions are in flight only if the last step was abandoned. They write to the shards that come next.
        self._wait()
        self._open, self._finished = None, False
        self._put_off.clear()
        self._deferred.clear()
        self._summed.clear()
        for bucket in self.buckets:
            _leave(bucket)

    def open(self, unit: int) -> None:
        """Let gradients of a unit come. The first one of each parameter overwrites what another unit left there."""
        self.close(unless=unit)
        if self._open == unit or unit not in self._of:
            return
        self._open, self._came_late = unit, False
        if self._stream is not None:
            self._stream.begin()
        # The unit that had these buffers before may still be being reduced from them.
        for bucket in self._of[unit]:
            self._wait(bucket.grads.data_ptr())
        self._first[unit].begin()
        self._bring_back(unit)

    def close(self, unless: int | None = None) -> None:
        """End the backward pass of the open unit, unless it is this one: start to add its gradients to the shards.

        If most of them are still to come, those that are there are deferred.
        """
        if self._open in (None, unless):
            return
        unit, self._open = self._open, None
        if self._put_off[unit] and not self._came_late:
            self._defer(unit)
            return
        self._first[unit].end()
        for bucket in self._of[unit]:
            _leave(bucket)
            self._reduce(bucket, self._busy.setdefault(bucket.grads.data_ptr(), []))

    def close_complete(self, unless: int) -> None:
        """Close the open unit if all its gradients are there.

        A checkpoint of several units recomputes them in the backward pass of the last one, which must stay open.
        """
        if self._open is not None and self._is_complete(self._open):
            self.close(unless)

    def _is_complete(self, unit: int) -> bool:
        return not any(state_of(p).untouched for bucket in self._of[unit] for p, _ in bucket.main_grads)

    @torch.no_grad()
    def _defer(self, unit: int) -> None:
        deferred = [
            (bucket, parameter, place, torch.empty_like(place))
            for bucket in self._of[unit]
            for parameter, place in bucket.main_grads
            if not state_of(parameter).untouched
        ]
        self._first[unit].skip()
        with nullcontext() if self._stream is None else self._stream.after_computation():
            for _, _, place, copy in deferred:
                copy.copy_(place)
        for bucket in self._of[unit]:
            _leave(bucket)
            if self._stream is not None:
                self._busy.setdefault(bucket.grads.data_ptr(), []).append(self._stream.done())
        self._deferred[unit] = deferred

    @torch.no_grad()
    def _bring_back(self, unit: int) -> None:
        for bucket, parameter, place, copy in self._deferred.pop(unit, ()):
            place.copy_(copy)
            state_of(parameter).untouched = False
            if bucket.autograd_adds:
                parameter.grad = place  # so that autograd adds to it

    def only_add(self, parameters: Sequence[nn.Parameter]) -> None:
        """Zero the gradients of these parameters when their unit opens, so that all of them add."""
        for first in self._first.values():
            first.leave_out(parameters)

    def finish(self) -> None:
        """Complete the sums of the step."""
        self.close()
        self._wait()
        self._finished = True
        for bucket in self.buckets:
            if bucket not in self._summed:  # no backward pass has reached it
                bucket.own_grads.zero_()

    @torch.no_grad()
    def _reduce(self, bucket: Bucket, busy: list[Callable[[], object]]) -> None:
        # The first sum of a step overwrites that of the last step, which saves zeroing all shards.
        first = bucket not in self._summed
        self._summed.add(bucket)
        if self._stream is None:
            with span("reduce_gradients", elements=bucket.layout.numel):
                busy.append(self._reducer.start_adding(bucket, first))
            return
        with self._stream.after_computation(), span("reduce_gradients", elements=bucket.layout.numel):
            # The sum is added on the reduction's stream too, so the main stream waits only when it needs the buffer
            # again.
            self._reducer.start_adding(bucket, first)()
        busy.append(self._stream.done())

    def _wait(self, address: int | None = None) -> None:
        for busy in self._busy.values() if address is None else [self._busy.get(address, [])]:
            while busy:
                busy.pop(0)()

    def _on_put_off(self, bucket: Bucket) -> Callable[[], None]:
        here = weakref.ref(self)
        unit = bucket.layout.kind.unit

        def put_off() -> None:
            if (alive := here()) is not None and unit is not None:
                alive._put_off[unit] += 1

        return put_off

    def _on_late(self, bucket: Bucket) -> Callable[[], None]:
        here = weakref.ref(self)
        unit = bucket.layout.kind.unit

        def begin() -> None:
            # The unit was closed at the end of its backward pass, without this gradient. It opens again.
            if (alive := here()) is not None and unit is not None:
                alive.open(unit)
                alive._came_late = True
                alive._put_off[unit] -= 1

        return begin

    def _on_grad_ready(self, bucket: Bucket, name: str) -> Callable[[], None]:
        here = weakref.ref(self)  # a hook of a parameter holds this closure: a strong reference would leak the engine
        unit = bucket.layout.kind.unit

        def arrived() -> None:
            if (alive := here()) is None or alive.recording:
                return
            if alive._finished:
                raise MegalightError(
                    f"a gradient of {name} arrived after those of its step were reduced, by the step or by clipping. "
                    "Call zero_grad() before the backward passes of the next one."
                )
            if alive._open != unit:
                raise MegalightError(
                    f"a gradient of {name} arrived outside the backward pass of its unit, when the memory for it was "
                    "in use by another one. Its module is used without being called, or its output is hidden in an "
                    "object that is no list, tuple or dict. Leave its class out of data_parallel.units, or use "
                    "data_parallel.level='optim'."
                )
            # The reduction of the unit waits for the main stream only. That one waits for input gradients of a shared
            # expert on a stream of its own, but not for gradients that autograd adds to parameters after these.
            if alive._stream is not None:
                alive._stream.follow()

        return arrived


def _leave(bucket: Bucket) -> None:
    """Take the buffer of gradients from the parameters of a unit: another unit may use it next."""
    for parameter, _ in bucket.main_grads:
        parameter.grad = None


class MainGradients:
    """Gradients in the buckets' buffers, from the first one of a step to the reduced ones that the optimizer reads.

    The engine uses this class. So does code that replays recorded passes: it calls :meth:`noting` and :meth:`arrive`
    for single modules, :meth:`adopt` and :meth:`give_up` for all passes of a step.

    Args:
        buckets: in the order in which they are sent.
        everyone: all ranks that train together, for the norm; None for a single rank.
        reducer: sums the gradients of a bucket.
        overlap: send buckets while the last backward passes run.
        unused: finds the parameters without a gradient.

    Attributes:
        everyone: may be set to a larger group, if ranks outside of the mesh train another part of the same model.
        of_units: the gradients that each rank keeps only its shard of.
        unused: for each bucket the places of the parameters that had no gradient in this step, on no rank.
        reduced: whether :meth:`finish` has run since the last :meth:`zero`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        everyone: ProcessGroup | None,
        device: torch.device,
        reducer: Reducer,
        overlap: bool,
        unused: UnusedParameters,
    ) -> None:
        self.buckets = buckets
        self.device = device
        self._reducer = reducer
        self._whole = [bucket for bucket in buckets if not bucket.shards_grads]
        self._partial = PartialReducer(buckets, device)
        self.everyone = everyone
        self._counted = [bucket.shard.counted_runs() for bucket in buckets]
        self._stream = side_stream(device, any(bucket.group is not None for bucket in buckets))
        if self._stream is not None:
            # A run that is dropped in the middle of a step leaves reductions on their way, which nobody waits for.
            self._stream.uses(flat for bucket in buckets for flat in (bucket.grads, bucket.own_grads))
        self._pending: list[Callable[[], Tensor]] = []
        self._scaler: Callable[[Tensor | None], None] | None = None
        self._factor: Tensor | None = None
        self.reduced = False
        self._any_dtype = False
        self.of_units = UnitGradients([b for b in buckets if b.shards_grads], reducer, self._stream)
        self._first = FirstWrites(self._whole)
        self._arrivals = GradReadyCounter(self._whole, self._send, overlap, self._stream)
        self._unused = unused
        self.unused: list[frozenset[int]] = [frozenset()] * len(buckets)

    # ---------------------------------------------------------------- one step

    def zero(self) -> None:
        """Discard all gradients, and prepare for the micro-batches of the next step."""
        self.reduced = False
        self.stepped()
        self._wait()  # reductions are pending only if the previous step was abandoned halfway
        self._unsend()
        self._unused.begin()
        self._first.begin()
        self.of_units.begin()

    @contextmanager
    def passes(self, micro_batches: int, reduce: bool) -> Iterator[None]:
        """Run passes of ``micro_batches`` micro-batches inside; ``reduce``: they are the last before :meth:`finish`."""
        self._arrivals.begin(micro_batches, reduce)
        try:
            yield
        finally:
            self._arrivals.stop()
        # Not after an error: the gradients are incomplete then, and `zero` starts over.
        self.of_units.close()
        self._arrivals.learn()
        self._first.end()

    def finish(self) -> None:
        """Reduce the remaining buckets, wait for all of them, and set ``bucket.reduced``; once per step."""
        if self.reduced:
            return
        self.reduced = True
        # Passes may have been left out altogether, and every bucket is read from here on.
        self._first.end()
        for bucket in self._whole:
            # Nothing was learned yet, or overlap is off, or a parameter got no
            # gradient: these buckets are sent now.
            if not bucket.sent:
                self._send(bucket)
        with torch.no_grad():
            # Buckets are sent strictly in order, so pending reductions and buckets match one by one.
            reduced = dict(zip(self._whole, self._wait(), strict=True))
            self.of_units.finish()
            gradients = [reduced.get(bucket, bucket.own_grads) for bucket in self.buckets]
            # Partial gradients (of other axes) are summed after the data-parallel sum, on this rank's interval only.
            self._partial(gradients)
            for bucket, gradient in zip(self.buckets, gradients, strict=True):
                # Optimizers of torch want gradients in the dtype of their parameters. Fused ones read the wider sums as
                # they are.
                bucket.set_reduced(gradient if self._any_dtype else gradient.to(bucket.shard.master.dtype))
        if not capturing():
            self.unused = self._unused.find()

    @property
    def first(self) -> bool:
        """Whether no passes have ended since :meth:`zero`: a first gradient overwrites the buffer, later ones add."""
        return self._first.wanted

    @property
    def values(self) -> list[Tensor]:
        """The reduced gradients of the shards, as :meth:`finish` left them.

        Raises:
            MegalightError: they are not reduced yet.
        """
        gradients = [bucket.reduced for bucket in self.buckets]
        if any(gradient is None for gradient in gradients):
            raise MegalightError("gradients are not reduced yet; call finish_grad_sync() first.")
        return [gradient for gradient in gradients if gradient is not None]

    def norm(self) -> Tensor:
        """The L2 norm of the reduced gradients of the whole model: 0-dim, on the device, equal on every rank.

        It is that of scaled ones, also where the optimizer multiplies them later.
        """
        views = [
            gradient[start:stop]
            for gradient, runs in zip(self.values, self._counted, strict=True)
            for start, stop in runs
        ]
        norm = global_norm(views, self.everyone, self.device)
        return norm if self._factor is None else norm * self._factor.abs().to(norm.dtype)

    @torch.no_grad()
    def scale(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by a 0-dim tensor on the device."""
        if self._scaler is not None:
            # Factors multiply: several before one step act one after the other.
            self._factor = factor if self._factor is None else self._factor * factor
            self._scaler(self._factor)
        elif self.buckets:
            torch._foreach_mul_(self.values, factor)

    def stepped(self) -> None:
        """Forget what the optimizer had to multiply by: it has, or the gradients are discarded."""
        if self._factor is not None and self._scaler is not None:
            self._scaler(None)
        self._factor = None

    def scale_by(self, scaler: Callable[[Tensor | None], None]) -> None:
        """Let an optimizer do :meth:`scale`; it then also gets gradients in the dtype in which they were summed.

        Args:
            scaler: gets the product of all factors of a step; None: no factor.
        """
        self._scaler = scaler
        if has_grad_dtype():
            # Otherwise torch refuses a `.grad` of another dtype than the tensor's.
            self._any_dtype = True
            for bucket in self.buckets:
                bucket.shard.master.grad_dtype = None

    # ---------------------------------------------------------------- passes that were recorded

    @contextmanager
    def noting(self) -> Iterator[list[tuple[int, int]]]:
        """Record arriving gradients in the returned list instead of counting them; :meth:`arrive` counts them later.

        For passes that are recorded now and replayed later.
        """
        self.of_units.recording = True
        try:
            with self._arrivals.noting() as seen:
                yield seen
        finally:
            self.of_units.recording = False

    def places_of(self, parameters: Iterable[nn.Parameter]) -> list[tuple[int, int]]:
        """Return these parameters as :meth:`noting` and :meth:`arrive` identify them: ``(bucket, place)``."""
        wanted = {id(parameter) for parameter in parameters}
        return [
            (index, place)
            for index, bucket in enumerate(self.buckets)
            for place, info in enumerate(bucket.infos)
            if id(info.parameter) in wanted
        ]

    def arrive(self, seen: Sequence[tuple[int, int]]) -> None:
        """Count gradients that a replayed graph has produced, as no hook reports them; complete buckets are sent."""
        for index, place in seen:
            self._arrivals.count(index, place)

    def only_add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make all gradients of these parameters add to zeroed buffers: a recorded pass cannot both write and add."""
        found = list(parameters)
        self._unused.leave_out(found)
        self._first.leave_out(found)
        self.of_units.only_add(found)

    def adopt(self, gradients: Sequence[Tensor] | None) -> None:
        """Take over the state after passes that a replayed graph has run.

        Args:
            gradients: the reduced gradients of the shards; None: the graph did not reduce them.
        """
        # The graph has written, added and zeroed by itself, as the passes did when they were recorded.
        self._first.skip()
        if gradients is None:
            return
        self.reduced = True
        self.unused = self._unused.frozen()
        self.stepped()
        for bucket, gradient in zip(self.buckets, gradients, strict=True):
            bucket.sent = True
            bucket.set_reduced(gradient)

    def give_up(self, first: bool) -> None:
        """Return to the state before passes that never ran on the device; sums of earlier passes stay.

        Args:
            first: the value of :attr:`first` before these passes.
        """
        # Gradients that arrive after this belong to no step.
        self._arrivals.stop()
        self._pending = []
        self.reduced = False
        self._unsend()
        # Nothing was written, so the next gradient must overwrite the old values.
        if first:
            self._first.begin()

    # ---------------------------------------------------------------- sending

    def _send(self, bucket: Bucket) -> None:
        bucket.sent = True
        with torch.no_grad():
            # Old values of the last step must not be sent: what no gradient has reached becomes zero first.
            self._first.complete(bucket)
            if self._stream is None:
                with span("reduce_gradients", elements=bucket.layout.numel):
                    self._pending.append(self._reducer.start(bucket))
                return
            # The reduction's own stream waits for the gradients that the current stream writes.
            with self._stream.after_computation(), span("reduce_gradients", elements=bucket.layout.numel):
                reduced = self._reducer.start(bucket)()
            self._pending.append(lambda: reduced)

    def _wait(self) -> list[Tensor]:
        gradients = [finish() for finish in self._pending]
        self._pending = []
        if gradients and self._stream is not None:
            # The stream waits, not the host: the optimizer's kernels are queued behind the reductions.
            self._stream.join()
        return gradients

    def _unsend(self) -> None:
        for bucket in self.buckets:
            bucket.sent = False
            bucket.set_reduced(None)
