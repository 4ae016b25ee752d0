"""Messages of pipelines, gathers of units and sums of gradients through slots: no copy overtakes what it must not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megalight.parallel.data_parallel import reduce
from megalight.parallel.data_parallel.gather import Pushes
from megalight.parallel.data_parallel.reduce import PushedSums
from megalight.parallel.peers import memory
from megalight.parallel.peers.memory import Flag
from megalight.parallel.pipeline.p2p_communication import NeighborSlots, PeerChannel, offsets
from tests.parallel.peers.hazards import Place, Stream, World, note_sum, play

ROWS, WIDTH, MESSAGES = 2, 4, 7


def messages(world: World) -> None:
    """Two ranks send each other one message after another, from memory that is used again; slots grow in between."""
    rank = world.local.rank
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
    line = NeighborSlots(group)
    out, into = (PeerChannel(1 - rank, group, group, line) for _ in range(2))
    for rows in (ROWS, 40 * ROWS):
        tensor, buffer = (Place.private(world, (rows, WIDTH)) for _ in range(2))
        assert line.slot(0, offsets([tensor])[-1]) is None  # type: ignore[list-item]  # as in a first run
        line.prepare(2)
        for _ in range(MESSAGES):
            world.access(tensor, write=True)
            sent = out.send([tensor])  # type: ignore[list-item]
            (found,) = into.receive([buffer]).wait()  # type: ignore[list-item]
            world.access(found, write=False)  # type: ignore[arg-type]
            sent.wait()
    # One rank alone sends: nothing that comes back tells it how far the other one is.
    for _ in range(MESSAGES):
        if rank:
            (found,) = into.receive([buffer]).wait()  # type: ignore[list-item]
            world.access(found, write=False)  # type: ignore[arg-type]
        else:
            world.access(tensor, write=True)
            out.send([tensor]).wait()  # type: ignore[list-item]


def gathers(world: World) -> None:
    """Two units in one buffer and one in another, gathered ahead of computation; then all shards change."""
    rank, size = world.local.rank, world.size
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    pushes = Pushes(torch.device("cpu"), SimpleNamespace(why_not_over=lambda group: None))  # type: ignore[arg-type]
    compute, side = world.local.stream, Stream()
    buffers = []
    for _ in range(2):
        pushes.room(size, torch.float32, group)
        cells = np.empty(size, dtype=object)
        # The second memory of each buffer has its data; the first one has its flags.
        cells[:] = [(world.local.made, rank, row) for row in range(size)]
        buffers.append(Place(world, cells, 1))
    kept = (rank, rank + 1)
    units: list[Any] = [
        SimpleNamespace(params=buffers[turn], own_params=Place.private(world, (1, 1)), kept=kept) for turn in (0, 1, 0)
    ]

    def fetch(unit: Any) -> Any:
        side.wait_stream(compute)
        world.local.stream = side
        assert pushes.gather(unit)
        world.local.stream = compute
        return side.record_event()

    for _ in range(3):
        for unit in units:  # the optimizer
            world.access(unit.own_params, write=True)
        coming = fetch(units[0])
        for number, unit in enumerate(units):
            compute.wait_event(coming)
            if number + 1 < len(units):
                coming = fetch(units[number + 1])
            world.access(unit.params, write=False)
        # Own shards have left before they change: the last event is behind all copies.
        compute.wait_event(side.record_event())


def whole(world: World) -> None:
    """Two buckets of whole parameters in one memory: each update is gathered while the next passes wait for it."""
    rank, size = world.local.rank, world.size
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    pushes = Pushes(torch.device("cpu"), SimpleNamespace(why_not_over=lambda group: None))  # type: ignore[arg-type]
    compute, side = world.local.stream, Stream()
    rooms = pushes.rooms([size, size], torch.float32, group)
    assert rooms is not None
    kept = (rank, rank + 1)
    buckets: list[Any] = [
        SimpleNamespace(params=room, own_params=room[slice(*kept)], kept=kept)  # type: ignore[misc]
        for room in rooms
    ]
    for _ in range(3):
        for bucket in buckets:  # the passes of a step
            world.access(bucket.params, write=False)
        coming = []
        for bucket in buckets:  # the optimizer
            world.access(bucket.own_params, write=True)
            side.wait_stream(compute)
            world.local.stream = side
            assert pushes.gather(bucket)
            world.local.stream = compute
            coming.append(side.record_event())
        for event in coming:
            compute.wait_event(event)
    for bucket in buckets:
        world.access(bucket.params, write=False)


class _Group(SimpleNamespace):
    __hash__ = object.__hash__


def sums(world: World) -> None:
    """Gradients in two buffers in turn, summed beside the computation; the first time each sum is overwritten."""
    rank, size = world.local.rank, world.size
    group: Any = _Group(rank=lambda: rank, size=lambda: size)
    pushed = PushedSums(torch.device("cpu"))
    piece = memory.BOUNDARY // 4
    pushed.reserve(group, memory.BOUNDARY)
    compute, side = world.local.stream, Stream()
    length = 2 * piece + 3  # three pieces and two slots
    gradients = [Place.private(world, (size * length, 1)) for _ in range(2)]
    shards = [Place.private(world, (length, 1)) for _ in range(2)]
    done: list[Any] = [None, None]
    for unit in range(6):
        turn = unit % 2
        if done[turn]:
            compute.wait_event(done[turn])
        world.access(gradients[turn], write=True)
        side.wait_stream(compute)
        world.local.stream = side
        pushed.sum(gradients[turn], group, shards[turn], add=unit >= 2)  # type: ignore[arg-type]
        world.local.stream = compute
        done[turn] = side.record_event()
    for turn in range(2):
        compute.wait_event(done[turn])
        world.access(shards[turn], write=False)


def _own(self: Any, numel: int, dtype: Any, offset: int) -> Place:
    place: Place = self._handle.get_buffer(self.rank, (numel, 1), dtype, offset)
    return place


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "why_not", lambda device: None)
    monkeypatch.setattr(memory, "unreachable", lambda group: None)
    monkeypatch.setattr(reduce, "sum_terms", note_sum)
    monkeypatch.setattr(memory.PeerMemory, "own", _own)


def test_messages_are_ordered() -> None:
    assert play(2, messages) == []


@pytest.mark.parametrize("calls", [gathers, whole, sums])
@pytest.mark.parametrize("size", [2, 3])
def test_units_are_ordered(size: int, calls: Any) -> None:
    assert play(size, calls) == []


@pytest.mark.parametrize("calls", [messages, gathers, whole, sums])
@pytest.mark.parametrize("kind", [Flag.FREE, Flag.READY])
def test_every_flag_is_needed(calls: Any, kind: Flag) -> None:
    assert play(2, calls, (1, kind))


@pytest.mark.parametrize("calls", [messages, gathers, whole, sums])
def test_every_wait_for_a_stream_is_seen(calls: Any) -> None:
    with patch.object(Stream, "wait_stream", lambda self, other: None):
        assert play(2, calls)
