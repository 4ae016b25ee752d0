"""Thousands of ranks with a fake process group: groups, ranks and stages are right."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalight.parallel.mesh import DENSE_AXES, EXPERT_AXES, ParallelMesh
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.pipeline.schedules import build, check
from megalight.parallel.pipeline.timeline import check_transfers

MESHES = [
    {"world_size": 4096, "tp": 8, "cp": 4, "pp": 16},
    {"world_size": 4096, "tp": 8, "cp": 1, "pp": 8, "ep": 16, "etp": 2},
    {"world_size": 16384, "tp": 8, "cp": 8, "pp": 16},
    {"world_size": 16384, "tp": 8, "cp": 1, "pp": 128},
    {"world_size": 16384, "tp": 4, "cp": 2, "pp": 16, "ep": 64},
]
LLAMA_405B = 126


@contextmanager
def world(size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def grids(sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Both views of all ranks as arrays in Megatron's order, tp (etp) fastest; dp and edp take what is left."""
    s = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": 1, **sizes}
    ranks = np.arange(s["world_size"])
    return {
        "dense": ranks.reshape(s["pp"], -1, s["cp"], s["tp"]),
        "expert": ranks.reshape(s["pp"], -1, s["ep"], s["etp"]),
    }


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))
def test_groups_of_sampled_ranks_are_megatrons(sizes: dict[str, int]) -> None:
    views = grids(sizes)
    size = sizes["world_size"]
    for rank in [0, size - 1, *random.sample(range(size), 6)]:
        mesh = ParallelMesh(global_rank=rank, **sizes)
        for order, grid in ((DENSE_AXES, views["dense"]), (EXPERT_AXES, views["expert"])):
            place = np.argwhere(grid == rank)[0]
            assert tuple(place) == tuple(mesh.rank(axis) for axis in order)
            assert grid.shape == tuple(mesh.size(axis) for axis in order)
            for axes in [(axis,) for axis in order] + list(itertools.combinations(order, 2)):
                index = tuple(slice(None) if axis in axes else place[i] for i, axis in enumerate(order))
                assert mesh.ranks(*axes) == tuple(grid[index].flatten())


@pytest.mark.parametrize("sizes", MESHES[::2], ids=lambda sizes: str(sizes["world_size"]))
def test_groups_along_every_axis_partition_the_world(sizes: dict[str, int]) -> None:
    for axis in (*DENSE_AXES, *EXPERT_AXES[1:]):
        group_size = ParallelMesh(**sizes).size(axis)
        seen: set[int] = set()
        for rank in range(sizes["world_size"]) if group_size > 1 else ():
            if rank not in seen:
                ranks = ParallelMesh(global_rank=rank, **sizes).ranks(axis)
                assert len(ranks) == group_size
                assert seen.isdisjoint(ranks), f"groups along {axis} overlap"
                seen.update(ranks)
        assert len(seen) in (0, sizes["world_size"])


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))
def test_a_rank_makes_its_groups(sizes: dict[str, int]) -> None:
    size = sizes["world_size"]
    rank = random.randrange(size)
    with world(size, rank):
        mesh = ParallelMesh(global_rank=rank, **sizes)
        for axes in [("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp"), ("tp", "cp"), ("ep",), ("edp",), ("etp", "ep")]:
            group = mesh.group(*axes)
            ranks = mesh.ranks(*axes)
            if group is None:
                assert ranks == (rank,)
            else:
                assert dist.get_process_group_ranks(group) == list(ranks)
                assert dist.get_rank(group) == ranks.index(rank)
        assert mesh.group(*DENSE_AXES) is dist.group.WORLD


def test_stages_of_sampled_ranks() -> None:
    """126 layers on 16 x 2 stages: embedding and loss count as layers, so the first and the last stage hold 3 of 4."""
    layout = PipelineLayout.even(LLAMA_405B, 16, 2, count_embedding=True, count_loss=True)
    sizes = {"world_size": 16384, "tp": 8, "cp": 8, "pp": 16}
    seen: dict[int, tuple[int, ...]] = {}
    for rank in random.sample(range(16384), 512):
        mesh = ParallelMesh(global_rank=rank, **sizes)
        stages = layout.of_rank(mesh.rank("pp"))
        assert mesh.rank("pp") == rank // 1024
        assert [stage.index for stage in stages] == [rank // 1024, rank // 1024 + 16]
        assert [stage.embed for stage in stages] == [rank < 1024, False]
        assert [stage.head for stage in stages] == [False, rank >= 15 * 1024]
        assert [len(stage.layers) for stage in stages] == [3 if rank < 1024 else 4, 3 if rank >= 15 * 1024 else 4]
        seen[rank // 1024] = tuple(layer for stage in stages for layer in stage.layers)
    assert sorted(layer for layers in seen.values() for layer in layers) == list(range(LLAMA_405B))


def test_schedules_of_128_stages() -> None:
    one = check("interleaved", 128, 4, 512).of_rank(77, 128, 4, 512, None)
    assert len(one) == 2 * 4 * 512
    check_transfers(build("auto", 128, 1, 256))
