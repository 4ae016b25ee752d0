"""Calls of ranks played on streams that only keep vector clocks: no copy may overtake what it must not.

Every rank is a thread. Streams do nothing but count; waiting for a stream, an event or a flag merges clocks. Two
accesses to one row of memory, one of them a write, must be ordered by the clocks, and no flag may be raised twice
before it is seen.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from megalight.parallel.peers import driver, spin
from megalight.parallel.peers import memory as copies
from megalight.parallel.peers.memory import Flag

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

    def synchronize(self) -> None: ...


class World:
    """What the ranks of one play share.

    Args:
        size: how many ranks.
        forgotten: flags that nobody waits for: the number of the memory that they lie in, and their kind.
    """

    def __init__(self, size: int, forgotten: tuple[int, Flag] | None) -> None:
        self.size = size
        self.forgotten = forgotten
        self.local = threading.local()
        self.change = threading.Condition()
        self.raised: dict[int, Clock] = {}
        self.lost = 0
        self.accesses: list[tuple[Any, bool, int, int, Clock]] = []
        self.fresh = itertools.count()

    def access(self, place: Place, write: bool, stream: Stream | None = None) -> None:
        stream = stream or self.local.stream
        stream.clock[stream.number] += 1
        now = dict(stream.clock)
        self.accesses += [(cell, write, stream.number, now[stream.number], now) for cell in place.cells.flat]

    def copy(self, stream: Stream, target: Place, source: Place) -> None:
        assert source.shape == target.shape
        self.access(source, write=False, stream=stream)
        self.access(target, write=True, stream=stream)

    def wait(self, stream: Stream, flags: tuple[int, ...]) -> None:
        for flag in flags:
            assert flag >> 32 & 0xFF == self.local.rank, "streams wait for flags on their own device"
            kind = (flag & 0xFFFFFFFF) // 4 // self.size % len(Flag)
            with self.change:
                if (flag >> 40, kind) == self.forgotten:
                    self.raised.pop(flag, None)
                    continue
                assert self.change.wait_for(lambda flag=flag: flag in self.raised or self.lost, 30)  # type: ignore[misc]
                stream.merge(self.raised.pop(flag, {}))  # once one is lost, anything goes

    def spin(self, watch: object, flags: tuple[int, ...], memory: object) -> None:
        self.wait(self.local.stream, flags)

    def raise_flags(self, stream: Stream, flags: tuple[int, ...]) -> None:
        with self.change:
            for flag in flags:
                self.lost += flag in self.raised
                self.raised[flag] = dict(stream.clock)
            self.change.notify_all()

    def races(self) -> list[Any]:
        """Cells with accesses out of order, and a word for each flag that was lost."""
        by_cell = defaultdict(list)
        for cell, *access in self.accesses:
            by_cell[cell].append(access)
        return ["lost"] * self.lost + [
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
    itemsize = 4

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

    def numel(self) -> int:
        return int(np.prod(self.shape))

    def detach(self) -> Place:
        return self

    contiguous = detach

    def data_ptr(self) -> Any:
        return self.cells.flat[0]

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


def note_sum(out: Any, own: Any, others: Any, place: int, *, add: bool = False) -> None:
    """Stands for :func:`megalight.ops.sum_terms.sum_terms`."""
    for term in (own, *others):
        assert term.shape == out.shape
        out.world.access(term, write=False)
    out.world.access(out, write=True)


class Handle:
    def __init__(self, world: World, name: int) -> None:
        self.world, self.name = world, name
        self.buffer_ptrs = [name << 40 | rank << 32 for rank in range(world.size)]

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Place:
        count, first = int(np.prod(shape[:-1])), offset // shape[-1]
        cells = np.empty(count, dtype=object)
        cells[:] = [(self.name, rank, first + row) for row in range(count)]
        return Place(self.world, cells.reshape(shape[:-1]), shape[-1])


def play(size: int, calls: Callable[[World], None], forgotten: tuple[int, Flag] | None = None) -> list[Any]:
    """The races of all ranks' calls.

    Args:
        size: how many ranks.
        calls: what a rank does.
        forgotten: flags that nobody waits for (:class:`World`).
    """
    world = World(size, forgotten)
    errors: list[BaseException] = []

    def rank_of(rank: int) -> None:
        world.local.rank, world.local.stream, world.local.made = rank, Stream(), 0
        try:
            calls(world)
        except BaseException as error:
            errors.append(error)

    def empty(size: int, dtype: Any, device: Any) -> Any:
        world.local.clearing = True  # behind whatever the default stream has to do
        return torch.zeros(size, dtype=dtype)

    def cleared() -> None:
        world.local.clearing = False

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, world.local.stream = world.local.stream, stream
        yield
        world.local.stream = before

    together = threading.Barrier(size, timeout=30)

    def rendezvous(memory: Any, group: Any) -> Handle:
        assert not world.local.clearing, "a peer's first flag would be cleared away"
        world.local.made += 1
        handle = Handle(world, world.local.made)
        for word in memory.view(torch.int32).nonzero().flatten().tolist():
            world.raised[handle.buffer_ptrs[world.local.rank] + 4 * word] = {}
        together.wait()
        return handle

    memory = SimpleNamespace(empty=empty)
    fakes = {
        "current_stream": lambda: world.local.stream,
        "Stream": Stream,
        "stream": on,
        "current_device": lambda: 0,
        "default_stream": lambda device: SimpleNamespace(synchronize=cleared),
    }
    calls_of = {"wait": world.wait, "raise_flags": world.raise_flags, "copy": world.copy}
    with (
        patch.multiple(torch.cuda, **fakes),
        patch.multiple(driver, **calls_of),
        patch.object(copies, "symmetric_memory", lambda: memory),
        patch.object(copies, "MEETINGS", SimpleNamespace(meet=rendezvous)),
        patch.multiple(
            spin,
            wait_with=world.spin,
            raise_flags=lambda flags: world.raise_flags(world.local.stream, flags),
            prepare=lambda count: None,
        ),
    ):
        threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    assert world.accesses
    return world.races()
