from __future__ import annotations

import itertools
import random
import time

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalight.errors import LayoutError
from megalight.parallel.mesh import DENSE_AXES, EXPERT_AXES, ParallelMesh
from tests.workers import run

LAYOUTS = [
    {"world_size": 1},
    {"world_size": 6, "tp": 2},
    {"world_size": 12, "tp": 2, "pp": 3},
    {"world_size": 24, "tp": 2, "cp": 2, "pp": 3, "ep": 4},
    {"world_size": 32, "tp": 4, "cp": 2, "pp": 2, "ep": 4, "etp": 2},
    {"world_size": 36, "tp": 6, "cp": 3, "etp": 2, "ep": 9},
]


def coordinates(layout: dict[str, int]) -> list[dict[str, int]]:
    """Every rank's coordinates, by counting."""
    mesh = ParallelMesh(**layout)
    table = []
    for order in (DENSE_AXES, EXPERT_AXES):
        sizes = [range(getattr(mesh, axis)) for axis in order]
        table.append([dict(zip(order, place, strict=True)) for place in itertools.product(*sizes)])
    return [{**expert, **dense} for dense, expert in zip(*table, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_coordinates_and_groups_equal_an_enumeration(layout: dict[str, int]) -> None:
    table = coordinates(layout)
    for rank in random.sample(range(len(table)), min(len(table), 8)):
        mesh = ParallelMesh(**layout, global_rank=rank)
        for axis, place in table[rank].items():
            assert mesh.rank(axis) == place
            assert mesh.rank(axis, of=0) == 0
        for order in (DENSE_AXES, EXPERT_AXES):
            for count in range(1, 5):
                for axes in itertools.combinations(order, count):
                    rest = [axis for axis in order if axis not in axes]
                    same = [r for r, p in enumerate(table) if all(p[axis] == table[rank][axis] for axis in rest)]
                    assert mesh.ranks(*axes) == tuple(same)


def test_an_axis_read_as_two() -> None:
    for rank in range(24):
        mesh = ParallelMesh(24, rank, tp=6, pp=2)
        tp, base = rank % 6, rank - rank % 6
        assert (mesh.rank("tp/2"), mesh.rank("tp%2")) == (tp // 2, tp % 2)
        assert (mesh.size("tp/2"), mesh.size("tp%2")) == (3, 2)
        assert mesh.ranks("tp%2") == (base + tp // 2 * 2, base + tp // 2 * 2 + 1)
        assert mesh.ranks("tp/2") == tuple(base + tp % 2 + 2 * i for i in range(3))
        assert mesh.ranks("tp/2", "tp%2") == mesh.ranks("tp") == mesh.ranks("tp%6")
        dp = [base % 6 + tp // 3 * 3 + i for i in range(3)]
        expected = sorted(12 * (rank // 12) + 6 * d + place for d in range(2) for place in dp)
        assert mesh.ranks("dp", "tp%3") == tuple(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 6, "tp": 4}, "6 is not a multiple of tp x cp x pp = 4. Use 4 x n processes"),
        ({"world_size": 4, "tp": 0}, "tp=0; it must be at least 1"),
        ({"world_size": 4, "ep": 3}, "multiple of etp x ep x pp = 3"),
        ({"world_size": 2, "global_rank": 2}, "rank 2 lies outside a world of 2"),
    ],
)
def test_impossible_layouts(options: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message.replace("(", r"\(")):
        ParallelMesh(**options)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("tpp",), "unknown mesh axis 'tpp'.*Did you mean 'tp'"),
        (("tp%3",), "size 4 cannot be read in runs of 3"),
        (("tp%0",), "in runs of 0"),
        (("dp", "ep"), "mix the dense and the expert view"),
    ],
)
def test_impossible_axes(axes: tuple[str, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ParallelMesh(8, tp=4, ep=2).ranks(*axes)


def test_a_group_needs_initialised_processes() -> None:
    assert ParallelMesh().group("tp") is None
    with pytest.raises(LayoutError, match=r"along tp has 2 ranks.*init_process_group"):
        ParallelMesh(2, tp=2).group("tp")


def test_description() -> None:
    assert ParallelMesh().describe() == "1 rank: one device"
    assert ParallelMesh(8, tp=2, pp=2, ep=2).describe() == "8 ranks: pp2 x dp2 x tp2 x ep2"


def test_four_thousand_ranks_in_seconds() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1234, world_size=4096)
    try:
        start = time.perf_counter()
        mesh = ParallelMesh(4096, 1234, tp=8, cp=2, pp=16, ep=8)
        for axes in [("tp",), ("dp",), ("dp", "cp"), ("pp",), ("cp",), ("ep",), ("edp",), ("tp%2",), ("tp", "cp")]:
            group = mesh.group(*axes)
            assert group is not None
            assert group.size() == len(mesh.ranks(*axes))
            assert mesh.group(*axes) is group
        assert mesh.group("pp", "dp", "cp", "tp") is dist.group.WORLD
        assert mesh.group("etp") is None
        assert time.perf_counter() - start < 5
    finally:
        dist.destroy_process_group()


def meet() -> tuple[int, int, list[str]]:
    mesh = ParallelMesh(4, dist.get_rank(), tp=2)
    one = [0] * 2
    dist.all_gather_object(one, mesh.global_rank, group=mesh.group("tp"))
    other = [0] * 2
    dist.all_gather_object(other, mesh.global_rank, group=mesh.group("dp"))
    device_mesh = mesh.device_mesh("cpu")
    assert device_mesh["tp"].get_local_rank() == mesh.rank("tp")
    return sum(one), sum(other), list(device_mesh.mesh_dim_names)


def test_groups_join_the_ranks_they_name() -> None:
    assert [answer[:2] for answer in run(meet, 4)] == [(1, 2), (1, 4), (5, 2), (5, 4)]
