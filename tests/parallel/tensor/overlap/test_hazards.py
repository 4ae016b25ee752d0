"""No copy of the symmetric way overtakes what it must not (:mod:`tests.parallel.peers.hazards`)."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from megalight.parallel import peers
from megalight.parallel.peers.memory import Flag
from megalight.parallel.tensor.overlap import symmetric
from megalight.parallel.tensor.overlap.spec import Product, rounds_of
from megalight.parallel.tensor.overlap.symmetric import Symmetric
from tests.parallel.peers import hazards
from tests.parallel.peers.hazards import Place, Stream, World

ROWS, INNER, WIDTH = 2, 3, 5


def calls(world: World, pieces: int) -> None:
    """What passes of two layers do, in their order, on one rank; and as much at once as there are slots for."""
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
        way.done(gathered)
        way.scatter_in_pieces(whole, product, pieces).finish()  # type: ignore[arg-type]
        way.scatter_in_pieces(whole, product, pieces).finish()  # type: ignore[arg-type]
        arriving = way.carrier.gather(share, rounds_of(rank, size, 1), "late")  # type: ignore[arg-type]
        leaving = way.scatter_in_pieces(whole, product, 1)  # type: ignore[arg-type]
        arriving.wait(0)
        arriving.finish()
        world.access(arriving.whole, write=False)  # type: ignore[arg-type]
        way.done(arriving.whole)
        leaving.finish()
    several = [way.carrier.gather(share, rounds_of(rank, size, 1), "late") for _ in range(symmetric.SLOTS)]  # type: ignore[arg-type]
    for arriving in several:
        arriving.wait(0)
        arriving.finish()
        world.access(arriving.whole, write=False)  # type: ignore[arg-type]
    for arriving in several:
        way.done(arriving.whole)
    for leaving in [way.scatter_in_pieces(whole, product, 1) for _ in range(symmetric.SLOTS)]:  # type: ignore[arg-type]
        leaving.finish()
    way.scatter_in_pieces(whole, product, 1).finish()  # type: ignore[arg-type]
    for _ in range(2):  # weight gradients that come later gather one input after another
        arriving = way.carrier.gather(share, rounds_of(rank, size, 1), "late")  # type: ignore[arg-type]
        arriving.wait(0)
        arriving.finish()
        world.access(share, write=True)
        world.access(arriving.whole, write=False)  # type: ignore[arg-type]
        way.done(arriving.whole)


def play(size: int, pieces: int, forgotten: tuple[int, Flag] | None = None) -> list[Any]:
    """The races of all ranks' calls."""
    with patch.object(symmetric, "sum_terms", hazards.note_sum):
        return hazards.play(size, lambda world: calls(world, pieces), forgotten)


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize(("size", "pieces"), [(2, 2), (4, 2), (4, 4)])
def test_everything_is_ordered(size: int, pieces: int, recorded: bool) -> None:
    with patch.object(peers.spin, "capturing", lambda: recorded):
        assert play(size, pieces) == []


@pytest.mark.parametrize("memory", [1, 3], ids=["shares", "sums"])
@pytest.mark.parametrize("kind", [Flag.FREE, Flag.READY])
def test_every_flag_is_needed(memory: int, kind: Flag) -> None:
    assert play(2, 2, (memory, kind))


def test_own_copies_are_waited_for_after_peers() -> None:
    """They may wait for a peer that is gone, and only the wait for its shares has a limit."""
    order: dict[int, list[str]] = defaultdict(list)
    spin, event = World.spin, Stream.wait_event

    def spinning(self: World, *arguments: Any) -> None:
        order[threading.get_ident()].append("peers")
        spin(self, *arguments)

    def waiting(self: Stream, other: Any) -> None:
        order[threading.get_ident()].append("copies")
        event(self, other)

    with patch.object(World, "spin", spinning), patch.object(Stream, "wait_event", waiting):
        assert play(2, 2) == []
    for calls in order.values():
        assert "copies" in calls
        assert all(before == "peers" for before, now in itertools.pairwise(["", *calls]) if now == "copies")


@pytest.mark.parametrize("name", ["wait_stream", "wait_event"])
def test_every_wait_is_seen(name: str) -> None:
    with patch.object(Stream, name, lambda self, other: None):
        assert play(2, 2)
