from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalight.errors import LayoutError
from megalight.parallel.mesh import DENSE_AXES, EXPERT_AXES, ParallelMesh, new_group
from tests.support.workers import run

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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_of_the_world_is_the_same_grid_elsewhere(layout: dict[str, int]) -> None:
    size = layout["world_size"]
    for rank in random.sample(range(size), min(size, 4)):
        whole, part = ParallelMesh(**layout, global_rank=rank), ParallelMesh(**layout, global_rank=rank + 7, offset=7)
        assert part.members == range(7, 7 + size)
        for axes in (("tp",), ("dp", "cp"), ("ep", "etp"), ("pp", "tp"), ("edp",)):
            assert part.ranks(*axes) == tuple(other + 7 for other in whole.ranks(*axes))
        for axis in (*DENSE_AXES, *EXPERT_AXES):
            assert part.rank(axis) == whole.rank(axis)
            assert part.rank(axis, of=7) == 0


def test_processes_outside_of_a_part() -> None:
    mesh = ParallelMesh(4, 1, tp=2, offset=2)
    assert [rank for rank in range(9) if mesh.contains(rank)] == [2, 3, 4, 5]
    assert (mesh.size("tp"), mesh.size("dp"), mesh.dp, mesh.rank("dp", of=5)) == (2, 2, 2, 1)
    assert mesh.describe() == "4 ranks from 2: dp2 x tp2"
    for ask in (mesh.rank, mesh.ranks, mesh.group):
        with pytest.raises(LayoutError, match=r"rank 1 is not in the mesh of ranks 2 to 5; ask mesh\.contains"):
            ask("tp")
    with pytest.raises(LayoutError, match="rank 6 is not in the mesh"):
        mesh.rank("tp", of=6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 6, "tp": 4}, "6 is not a multiple of tp x cp x pp = 4. Use 4 x n processes"),
        ({"world_size": 4, "tp": 0}, "tp=0; it must be at least 1"),
        ({"world_size": 4, "ep": 3}, "multiple of etp x ep x pp = 3"),
        ({"world_size": 2, "global_rank": 2}, "rank 2 lies outside a world of 2.*needs an offset"),
        ({"world_size": 2, "offset": -1}, "offset -1 and rank 0 must be at least 0"),
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


def test_a_group_needs_initialized_processes() -> None:
    assert ParallelMesh().group("tp") is None
    with pytest.raises(LayoutError, match=r"group of 2 ranks for the mesh.*init_process_group"):
        ParallelMesh(2, tp=2).group("tp")


def test_description() -> None:
    assert ParallelMesh().describe() == "1 rank: one device"
    assert ParallelMesh(8, tp=2, pp=2, ep=2).describe() == "8 ranks: pp2 x dp2 x tp2 x ep2"


def test_four_thousand_ranks() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1234, world_size=4096)
    try:
        mesh = ParallelMesh(4096, 1234, tp=8, cp=2, pp=16, ep=8)
        for axes in [("tp",), ("dp",), ("dp", "cp"), ("pp",), ("cp",), ("ep",), ("edp",), ("tp%2",), ("tp", "cp")]:
            group = mesh.group(*axes)
            assert group is not None
            assert group.size() == len(mesh.ranks(*axes))
            assert mesh.group(*axes) is group
        assert mesh.group("pp", "dp", "cp", "tp") is dist.group.WORLD
        assert mesh.group("etp") is None
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


def _shared() -> tuple[bool, int]:
    """A mesh of another layout whose ``dp`` ranks are the ``tp`` ranks of the first."""
    rank = dist.get_rank()
    first = ParallelMesh(4, rank, tp=2).group("tp")
    before = len(c10d._world.pg_names)
    second = ParallelMesh(4, rank, pp=2)
    found = second.group("dp"), ParallelMesh(4, rank, tp=2).group("tp")
    return all(group is first for group in found), len(c10d._world.pg_names) - before


def test_meshes_over_the_same_ranks_share_groups() -> None:
    assert run(_shared, 4) == [(True, 0)] * 4


def meet_side_by_side() -> tuple[float, bool]:
    rank = dist.get_rank()
    first, second = ParallelMesh(2, rank, tp=2, offset=0), ParallelMesh(2, rank, tp=2, offset=2)
    device_meshes = [mesh.device_mesh("cpu", ("tp",)) for mesh in (first, second)]
    value = torch.tensor(float(rank))
    own = first if first.contains(rank) else second
    dist.all_reduce(value, group=own.group("tp"))
    return float(value), device_meshes[own is second].get_local_rank() == own.rank("tp")


def test_grids_side_by_side_have_groups_of_their_own() -> None:
    assert run(meet_side_by_side, 4) == [(1, True), (1, True), (5, True), (5, True)]


def test_groups_join_the_ranks_they_name() -> None:
    assert [answer[:2] for answer in run(meet, 4)] == [(1, 2), (1, 4), (5, 2), (5, 4)]


def test_some_places_of_an_axis() -> None:
    meshes = [ParallelMesh(8, rank, tp=2, pp=4) for rank in range(8)]
    assert [mesh.ranks("pp:0+3") for mesh in meshes[:4]] == [(0, 6), (1, 7), (2,), (3,)]
    assert [mesh.rank("pp:0+3") for mesh in meshes] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert meshes[6].ranks("pp:0+3", "tp") == (0, 1, 6, 7)
    with pytest.raises(LayoutError, match="names one beyond"):
        meshes[0].size("pp:0+4")


def _uneven_histories() -> list[float]:
    """Only some ranks make the first groups; all make the last."""
    rank = dist.get_rank()
    mesh = ParallelMesh(4, rank, pp=4)
    ends = mesh.group("pp:0+3")
    if rank < 2:
        new_group((0, 1), "first")
        new_group((0, 1), "first")
    sums = []
    for group in (ends, new_group(range(4), "all"), ParallelMesh(4, rank, tp=2).group("tp")):
        value = torch.tensor(float(rank))
        if group is not None:
            dist.all_reduce(value, group=group)
        sums.append(float(value))
    return sums


def test_ranks_meet_in_groups_whatever_groups_they_made_before() -> None:
    assert run(_uneven_histories, 4) == [[3, 6, 1], [1, 6, 1], [2, 6, 5], [3, 6, 5]]


def test_torch_mesh_knows_ranks_by_any_order_of_axes() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=24)
    try:
        mesh = ParallelMesh(24, 5, tp=2, cp=2, pp=3, ep=4)
        for axes in (DENSE_AXES, ("tp", "pp", "dp", "cp"), ("ep", "pp", "edp"), ("tp", "dp/2", "pp", "dp%2", "cp")):
            torch_mesh = mesh.device_mesh("cpu", axes)
            assert torch_mesh.mesh_dim_names == axes
            for rank in range(24):
                place = tuple(mesh.rank(axis, of=rank) for axis in axes)
                assert torch_mesh.mesh[place] == rank
        for axes in (("tp", "dp"), ("pp", "ep", "tp"), ("tp", "tp", "dp", "pp")):
            with pytest.raises(LayoutError, match="do not tell the 24 ranks apart"):
                mesh.device_mesh("cpu", axes)
    finally:
        dist.destroy_process_group()
