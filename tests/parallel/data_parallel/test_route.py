"""Turns of units follow from the order of passes, so that each unit is gathered before its pass comes to it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo, unshard
from megalight.parallel.data_parallel.unit_memory import PassOrder, UnitPass
from megalight.parallel.data_parallel.unshard import Unsharder
from megalight.parallel.pipeline.executor import passes_of
from megalight.parallel.pipeline.schedules import build
from megalight.parallel.shard import ShardSpec
from tests.parallel.data_parallel.helpers import mesh
from tests.parallel.test_large_meshes import world


def _chunks(*sizes: int) -> list[nn.Sequential]:
    return [nn.Sequential(*(nn.Linear(2, 2) for _ in range(size))) for size in sizes]


def _route(chunks: list[nn.Sequential], schedule: str, rank: int, count: int = 12) -> PassOrder:
    actions = build(schedule, 2, len(chunks), count)[rank]
    return PassOrder(chunks, passes_of(actions))


def test_turns_follow_each_other_unless_passes_would_meet_in_one() -> None:
    two = _chunks(3, 2)
    units = [(layer,) for chunk in two for layer in chunk]
    assert PassOrder().turns(units, 2) == [0, 1, 0, 1, 0]
    assert PassOrder(two).turns(units, 3) == [0, 1, 2, 0, 1]
    # From the last layer of the first chunk to the first one of the second, and back: the numbering goes on.
    assert PassOrder(two, [UnitPass(0, True), UnitPass(1, True)] * 2).turns(units, 2) == [0, 1, 0, 1, 0]
    # Out of the first chunk into the end of the second, and from its beginning to that of the first.
    even = _chunks(2, 2)
    four, beside = (
        [(layer,) for chunk in even for layer in chunk],
        [UnitPass(0, True), UnitPass(1, False), UnitPass(0, True)],
    )
    assert PassOrder(even, beside).turns(four, 2) == [0, 1, 1, 0]
    # Gradients know backward passes alone.
    assert PassOrder(even, beside).turns(four, 2, backward_only=True) == [0, 1, 0, 1]
    # Models that run one after the other share no turns, in the order in which they run.
    assert PassOrder(two, phases=[[1], [0]]).turns(units, 2) == [2, 3, 2, 0, 1]
    assert PassOrder(two, phases=[[1], [0]]).by_phase(["first", "second", "in no chunk"]) == [
        ["second"],
        ["first", "in no chunk"],
    ]
    # Units in no chunk come last.
    assert PassOrder(two[1:]).parts(units) == [[3, 4], [0, 1, 2]]


def _late(sizes: tuple[int, ...], schedule: str, rank: int, known: bool) -> tuple[int, int]:
    """How many units were gathered only when a pass came to them, and how often units were gathered at all."""
    chunks = _chunks(*sizes)
    units = [(layer,) for chunk in chunks for layer in chunk]
    home = [number for number, size in enumerate(sizes) for _ in range(size)]
    infos = [
        ParamInfo(f"{unit}.{name}", p, ShardSpec.replicated(name, tuple(p.shape)), 0, home[unit], unit=unit)
        for unit, (layer,) in enumerate(units)
        for name, p in layer.named_parameters()
    ]
    route = _route(chunks, schedule, rank)
    engine = DataParallelEngine(
        infos,
        mesh(),
        DataParallelOptions(level="optim_grads_params"),
        units=units,
        route=route if known else PassOrder(chunks),
    )
    assert engine.units is not None
    for whole in ([b.params for b in engine.units.buckets], [b.grads for b in engine.buckets]):
        assert len({flat.data_ptr() for flat in whole}) == 2, "all chunks use the same buffers"
    gathers, late, hold, gather = [0], [0], Unsharder.unshard, unshard.gather

    def counted(*args: Any) -> Any:
        gathers[0] += 1
        return gather(*args)

    def held(self: Unsharder, unit: int) -> None:
        before = gathers[0]
        hold(self, unit)
        late[0] += gathers[0] - before

    first = {chunk: sum(sizes[:chunk]) for chunk in range(len(sizes))}
    with patch.object(unshard, "gather", counted), patch.object(Unsharder, "unshard", held):
        for number, (chunk, forward) in enumerate(route.passes):
            engine.units.follow(chunks, route.passes[number + 1 :] if known else ())
            places = range(first[chunk], first[chunk] + sizes[chunk])
            for place in places if forward else reversed(places):
                (engine.units.begin_forward if forward else engine.units.begin_backward)(place)
        engine.publish()
    return late[0], gathers[0]


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [((4,), "1f1b"), ((3, 4), "interleaved"), ((2, 2), "zero_bubble")],
)
def test_the_next_pass_is_prefetched(sizes: tuple[int, ...], schedule: str) -> None:
    with world(2, 0):
        for rank in range(2):
            (late, gathers), (later, others) = (_late(sizes, schedule, rank, known) for known in (True, False))
            assert gathers == others
            # One pass that came unannounced: the first one has no pass before it.
            assert late == later == 1 or late <= later / 2
