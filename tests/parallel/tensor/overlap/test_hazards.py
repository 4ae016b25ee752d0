"""No copy of the symmetric way overtakes what it must not: its calls, played on streams that only keep vector clocks.

Every rank is a thread. Streams do nothing but count; waiting for a stream, an event or a barrier merges clocks. Two
accesses to one row of memory, one of them a write, must be ordered by the clocks.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megalight.parallel.tensor.overlap import symmetric
from megalight.parallel.tensor.overlap.rounds import rounds_of
from megalight.parallel.tensor.overlap.spec import Product
from megalight.parallel.tensor.overlap.symmetric import Buffer, Symmetric

ROWS, INNER, WIDTH = 2, 3, 5
Clock = dict[int, int]


class Stream:
    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(Stream.numbers)
        self.clock: Clock = defaultdict(int)

    def merge(self, other: Clock) -> None:
        for number, count in other.items():
            self.clock[number] = max(self.clock[number], count)

    def wait_stream(self, other: Stream) -> None:
        self.merge(other.clock)

    def wait_event(self, event: Clock) -> None:
        self.merge(event)

    def record_event(self) -> Clock:
        return dict(self.clock)


class World:
    """What the ranks of one play share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.local = threading.local()
        self.meeting = threading.Barrier(size, timeout=30)
        self.clocks: dict[int, Clock] = {}
        self.accesses: list[tuple[Any, bool, int, int, Clock]] = []
        self.fresh = itertools.count()

    def access(self, place: Place, write: bool) -> None:
        stream = self.local.stream
        stream.clock[stream.number] += 1
        now = dict(stream.clock)
        self.accesses += [(cell, write, stream.number, now[stream.number], now) for cell in place.cells.flat]

    def barrier(self, channel: int = 0) -> None:
        self.clocks[self.local.rank] = dict(self.local.stream.clock)
        self.meeting.wait()
        for clock in self.clocks.values():
            self.local.stream.merge(clock)
        self.meeting.wait()

    def races(self) -> list[Any]:
        by_cell = defaultdict(list)
        for cell, *access in self.accesses:
            by_cell[cell].append(access)
        return [
            cell
            for cell, found in by_cell.items()
            for (write, stream, count, clock), (other_write, other, other_count, other_clock) in itertools.combinations(
                found, 2
            )
            if (write or other_write) and count > other_clock.get(stream, 0) and other_count > clock.get(other, 0)
        ]


class Place:
    """Rows of memory, by name; stands for a tensor ``[..., width]``."""

    dtype = torch.float32

    def __init__(self, world: World, cells: Any, width: int) -> None:
        self.world, self.cells, self.width = world, cells, width

    @classmethod
    def private(cls, world: World, shape: tuple[int, ...]) -> Place:
        cells = np.array([next(world.fresh) for _ in range(int(np.prod(shape[:-1])))], dtype=object)
        return cls(world, cells.reshape(shape[:-1]), shape[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.cells.shape, self.width)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * 4

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, index: Any) -> Place:
        return Place(self.world, self.cells[index], self.width)

    def view(self, *shape: int) -> Place:
        return Place(self.world, self.cells.reshape(shape[:-1]), self.width)

    def new_empty(self, *shape: int) -> Place:
        return Place.private(self.world, shape)

    def copy_(self, source: Place, non_blocking: bool = False) -> None:
        assert source.shape == self.shape
        self.world.access(source, write=False)
        self.world.access(self, write=True)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function in (torch.sum, torch.add)
        for place in args:
            if isinstance(place, Place):
                place.world.access(place, write=False)


class Handle:
    def __init__(self, world: World, name: int) -> None:
        self.world, self.name = world, name
        self.barrier = world.barrier

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Place:
        count, first = int(np.prod(shape[:-1])), offset // shape[-1]
        cells = np.empty(count, dtype=object)
        cells[:] = [(self.name, rank, first + row) for row in range(count)]
        return Place(self.world, cells.reshape(shape[:-1]), shape[-1])


def calls(world: World, pieces: int) -> None:
    """What forward and backward passes of two layers do, in their order, on one rank."""
    rank, size = world.local.rank, world.size
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    way = Symmetric(group, pieces)

    def multiply(rows: Any, out: Any) -> Any:
        out = Place.private(world, (len(rows), WIDTH)) if out is None else out
        world.access(rows, write=False)
        world.access(out, write=True)
        return out

    product = Product(multiply, INNER, WIDTH)
    share = Place.private(world, (ROWS, INNER))
    whole = Place.private(world, (size * ROWS, INNER))
    for keep in (False, True):
        world.access(share, write=True)
        y, gathered = way.gather_in_pieces(share, product, pieces, keep=keep)  # type: ignore[arg-type]
        world.access(y, write=False)  # type: ignore[arg-type]
        if keep:
            world.access(gathered, write=False)  # type: ignore[arg-type]
        way.scatter_in_pieces(whole, product, pieces).finish()  # type: ignore[arg-type]
        way.scatter_in_pieces(whole, product, pieces).finish()  # type: ignore[arg-type]
        arriving = way.carrier.gather(share, rounds_of(rank, size, 1), place_own=True)  # type: ignore[arg-type]
        leaving = way.scatter_in_pieces(whole, product, 1)  # type: ignore[arg-type]
        arriving.wait(0)
        world.access(arriving.whole, write=False)  # type: ignore[arg-type]
        leaving.finish()
    for _ in range(2):  # weight gradients that come later gather one input after another
        way.carrier.gather(share, rounds_of(rank, size, 1), place_own=True).wait(0)  # type: ignore[arg-type]
        world.access(share, write=True)


@contextmanager
def on(world: World, stream: Stream) -> Iterator[None]:
    before, world.local.stream = world.local.stream, stream
    yield
    world.local.stream = before


def play(size: int, pieces: int) -> list[Any]:
    """The races of all ranks' calls."""
    world = World(size)
    errors: list[BaseException] = []

    def rank_of(rank: int) -> None:
        world.local.rank, world.local.stream, world.local.made = rank, Stream(), 0
        try:
            calls(world, pieces)
        except BaseException as error:
            errors.append(error)
            world.meeting.abort()

    def empty(size: int, dtype: Any, device: Any) -> Any:
        world.local.clearing = True  # behind whatever the default stream has to do
        return SimpleNamespace(numel=lambda: size)

    def cleared() -> None:
        world.local.clearing = False

    def rendezvous(memory: Any, group: Any) -> Handle:
        assert not world.local.clearing, "a peer's first signal would be cleared away"
        world.local.made += 1
        return Handle(world, world.local.made)

    memory = SimpleNamespace(empty=empty, rendezvous=rendezvous)
    fakes = {
        "current_stream": lambda: world.local.stream,
        "Stream": Stream,
        "stream": lambda stream: on(world, stream),
        "current_device": lambda: 0,
        "default_stream": lambda device: SimpleNamespace(synchronize=cleared),
    }
    with patch.multiple(torch.cuda, **fakes), patch.object(symmetric, "symmetric_memory", lambda: memory):
        threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert world.accesses
    return world.races()


@pytest.mark.parametrize(("size", "pieces"), [(2, 2), (4, 2), (4, 4)])
def test_everything_is_ordered(size: int, pieces: int) -> None:
    assert play(size, pieces) == []


@pytest.mark.parametrize("buffer", [1, 2], ids=["shares", "sums"])
@pytest.mark.parametrize("second", [0, 1], ids=["before", "after"])
def test_every_barrier_is_needed(buffer: int, second: int) -> None:
    """Before shares are laid open, and after; before sums may come, and after."""
    seen = threading.local()
    whole = Buffer.barrier

    def forgetful(self: Buffer) -> None:
        counts = seen.__dict__.setdefault("counts", defaultdict(int))
        counts[self.handle.name] += 1
        if self.handle.name != buffer or counts[buffer] % 2 == second:
            whole(self)

    with patch.object(Buffer, "barrier", forgetful):
        assert play(2, 2)


@pytest.mark.parametrize("name", ["wait_stream", "wait_event"])
def test_every_wait_is_seen(name: str) -> None:
    with patch.object(Stream, name, lambda self, other: None):
        assert play(2, 2)
