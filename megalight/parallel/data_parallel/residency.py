"""The parameters of units come and go: shards stay, whole parameters are gathered into a few buffers in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megalight.parallel.data_parallel.buffers import Bucket
from megalight.parallel.data_parallel.gather import gather
from megalight.parallel.data_parallel.layout import TURNS


class Residency:
    """Gathers the whole parameters of a unit into the buffers of its turn, and knows which unit's are there.

    Addresses are permanent, contents are temporary: a parameter is always a view of the same memory. So nothing is ever
    released. A unit's parameters stay until another unit of the same turn needs the buffers.

    Args:
        units: the buckets of each unit, in the order of the forward pass.
    """

    def __init__(self, units: Sequence[Sequence[Bucket]], device: torch.device) -> None:
        self.units = units
        self._present: list[int | None] = [None] * TURNS
        self._arriving: dict[int, Callable[[], None]] = {}
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, unit: int) -> None:
        """Start to gather a unit, unless it is there. The computation with its predecessor must have been enqueued."""
        turn = unit % TURNS
        before = self._present[turn]
        if before == unit:
            return
        if before is not None:
            self._wait(before)  # a gather that nobody has waited for may still write there
        self._present[turn] = unit
        if self._stream is None:
            works = [gather(b.params, b.own_params, b.shard_group) for b in self.units[unit] if b.shard_group]
            self._arriving[unit] = partial(_wait_all, [work.wait for work in works])
            return
        # On its own stream, after all computation with the parameters that these replace.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for bucket in self.units[unit]:
                if bucket.shard_group is not None:
                    gather(bucket.params, bucket.own_params, bucket.shard_group).wait()
            arrived = self._stream.record_event()
        self._arriving[unit] = partial(_wait_event, arrived, self._device)

    def hold(self, unit: int) -> None:
        """Make a unit's parameters available now. On CUDA the current stream waits, not the host."""
        self.fetch(unit)
        self._wait(unit)

    def settle(self) -> None:
        """Wait for all gathers in flight, which read the shards."""
        for unit in list(self._arriving):
            self._wait(unit)

    def expire(self) -> None:
        """Forget what is there: the shards have new values."""
        self.settle()
        self._present = [None] * TURNS

    def fetch_first(self) -> None:
        """Start to gather the first units of the next forward pass."""
        for unit in range(min(TURNS, len(self.units))):
            self.fetch(unit)

    def _wait(self, unit: int) -> None:
        wait = self._arriving.pop(unit, None)
        if wait is not None:
            wait()


def _wait_all(waits: Sequence[Callable[[], object]]) -> None:
    for wait in waits:
        wait()


def _wait_event(event: torch.cuda.Event, device: torch.device) -> None:
    torch.cuda.current_stream(device).wait_event(event)
