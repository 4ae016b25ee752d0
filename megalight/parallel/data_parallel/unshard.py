"""ZeRO-3 unshard/reshard: shards stay, the whole parameters of a unit are all-gathered into a few buffers in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megalight.parallel.data_parallel.buffers import FlatParameters
from megalight.parallel.data_parallel.communication import side_stream
from megalight.parallel.data_parallel.fp8_parameters import FlatQuantized
from megalight.parallel.data_parallel.gather import Pushes, gather


class Unsharder:
    """Gathers the whole parameters of a unit into the buffers of its turn, and knows which unit's are there.

    Memory is permanent, contents are temporary: whenever a parameter has its values, it is a view of the same memory.
    A unit's parameters stay until another unit of the same turn needs the buffers. Without its values, a parameter has
    no memory: it reads NaN, and writing to it is an error. So nobody ever takes the values of another unit for its own.

    Args:
        units: the buckets of each unit, in the order of the forward pass.
        turn_of: the turn of each unit (:meth:`.route.Route.turns`), which has buffers of its own.
        first: the units of each model's first pass of a step, in order.
        pushes: the buffers that copy engines fill; None: collectives do.

    Attributes:
        turns: number of units that have memory at a time, of all models.
        whole: all parameters have their values, in memory of their own (:meth:`unshard_all`).
    """

    def __init__(
        self,
        units: Sequence[Sequence[FlatParameters | FlatQuantized]],
        device: torch.device,
        turn_of: Sequence[int],
        first: Sequence[Sequence[int]],
        pushes: Pushes | None = None,
    ) -> None:
        self.units = list(units)
        self.pushes = pushes
        self.turn_of = turn_of
        self.turns = max(turn_of) + 1
        self.first = first
        self.whole = False
        self._present: list[int | None] = [None] * self.turns
        self._shown: set[int] = set()
        self._arriving: dict[int, Callable[[], None]] = {}
        self._stream = side_stream(device)
        self.guard()

    def exchange(
        self, unit: int, old: Sequence[FlatParameters | FlatQuantized], new: Sequence[FlatParameters | FlatQuantized]
    ) -> None:
        """Replace some of a unit's buckets by others, which have no memory now."""
        # Buckets that leave are no longer gathered, and those that come have not been.
        self.forget()
        self.units[unit] = [*(bucket for bucket in self.units[unit] if bucket not in old), *new]

    def guard(self) -> None:
        """Keep memory from other uses until the last gathers from and into it are done."""
        # After the last step of a run the next units are still on their way. If the run is dropped then, nobody waits
        # for them, and their memory must not be used again before they have arrived.
        if self._stream is not None:
            self._stream.uses(flat for bucket in self._buckets for flat in (bucket.params, bucket.own_params))

    def prefetch(self, unit: int) -> None:
        """Start to gather a unit, unless it is there. The computation with its predecessor must have been enqueued."""
        turn = self.turn_of[unit]
        before = self._present[turn]
        if self.whole or before == unit:
            return
        if before is not None:
            self._wait(before)  # a gather that nobody has waited for may still write there
            # Before the gather starts: otherwise parameters of the old unit would read values of the new one.
            self._hide(before)
        self._present[turn] = unit
        if self._stream is None:
            self._arriving[unit] = partial(_wait_all, [self._start(bucket) for bucket in self.units[unit]])
            return
        # On its own stream, after all computation with the parameters that these replace.
        with self._stream.after_computation():
            for bucket in self.units[unit]:
                self._start(bucket)()
        self._arriving[unit] = self._stream.done()

    def _start(self, bucket: FlatParameters | FlatQuantized) -> Callable[[], object]:
        """Start to gather a bucket; return a function that waits for it."""
        if bucket.unit_group is None or (self.pushes is not None and self.pushes.gather(bucket)):
            return _nothing
        return gather(bucket.params, bucket.own_params, bucket.unit_group).wait

    def unshard(self, unit: int) -> None:
        """Make a unit's parameters available now. On CUDA the current stream waits, not the host."""
        if self.whole:
            return
        self.prefetch(unit)
        self._wait(unit)
        if unit not in self._shown:
            self._shown.add(unit)
            for bucket in self.units[unit]:
                bucket.show(bucket.params)

    def settle(self) -> None:
        """Wait for all gathers in flight, which read the shards."""
        for unit in list(self._arriving):
            self._wait(unit)

    def expire(self) -> None:
        """Forget what is there: the shards have new values."""
        self.forget()
        for bucket in self._buckets if self.whole else ():
            if bucket.unit_group is not None:
                gather(bucket.shown, bucket.own_params, bucket.unit_group).wait()

    def prefetch_first(self) -> None:
        """Start to gather the first units of the next forward pass."""
        for units in self.first:
            taken = set[int]()
            for unit in units:
                if self.turn_of[unit] in taken:
                    break
                taken.add(self.turn_of[unit])
                self.prefetch(unit)

    def unshard_all(self) -> None:
        """Give all parameters memory of their own, with their values, until :meth:`reshard`."""
        # Gathers in flight write to the buffers of turns, which are no longer shown.
        self.forget()
        for bucket in self._buckets:
            bucket.show(bucket.own_params.new_empty(bucket.layout.numel))
        self.whole = True
        self.expire()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy this rank's part of whole parameters, which somebody may have written to, into the shards."""
        # All ranks wrote the same values, so each keeps its own interval and nothing is sent.
        for bucket in self._buckets if self.whole else ():
            if not bucket.is_quantized:  # those come from the masters alone
                bucket.own_params.copy_(bucket.shown[slice(*bucket.kept)])

    def reshard(self) -> None:
        """End :meth:`unshard_all`: keep the shards only."""
        if self.whole:
            self.write_back()
            self.whole = False
            for unit in range(len(self.units)):
                self._hide(unit)

    @property
    def _buckets(self) -> list[FlatParameters | FlatQuantized]:
        return [bucket for buckets in self.units for bucket in buckets]

    def forget(self) -> None:
        """Wait for all gathers, and take the parameters of units from the buffers."""
        self.settle()
        self._present = [None] * self.turns
        for unit in tuple(self._shown):
            self._hide(unit)

    def _hide(self, unit: int) -> None:
        self._shown.discard(unit)
        for bucket in self.units[unit]:
            bucket.vacate()

    def _wait(self, unit: int) -> None:
        wait = self._arriving.pop(unit, None)
        if wait is not None:
            wait()


def _nothing() -> None: ...


def _wait_all(waits: Sequence[Callable[[], object]]) -> None:
    for wait in waits:
        wait()
