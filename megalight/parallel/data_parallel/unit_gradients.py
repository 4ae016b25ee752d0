"""Gradients of units: summed over ranks after each backward pass through a unit, and kept as shards."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from megalight.errors import MegalightError
from megalight.ops.parameter import state_of
from megalight.parallel.data_parallel.buffers import Bucket
from megalight.parallel.data_parallel.communication import SideStream
from megalight.parallel.data_parallel.grad_hooks import FirstWrites, register_grad_hook
from megalight.parallel.data_parallel.reduce import Reducer
from megalight.parallel.trace import span


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
                arrived = self._on_arrival(bucket, info.name)
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

    def _on_arrival(self, bucket: Bucket, name: str) -> Callable[[], None]:
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
