"""Parameters whose gradients are summed over different axes, under one engine."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.ops.parameter import state_of
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardPiece, ShardSpec, check_cover
from tests.parallel.data_parallel.helpers import assert_close, mesh, split_spec
from tests.support.workers import run


def _values(name: str, rank: int, *shape: int) -> Tensor:
    seed = sum(map(ord, name)) + 1000 * rank
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def specs(grid: ParallelMesh) -> dict[str, ShardSpec]:
    """A dense weight, and a stack of 4 experts of ``[3, 5]``, divided over ``ep``."""
    here, first = 4 // grid.ep, grid.rank("ep") * 4 // grid.ep
    pieces = [ShardPiece(f"expert{first + i}", (3, 5), (0, 0), (3, 5), 15 * i) for i in range(here)]
    dense = ShardSpec.replicated("dense", (7,), owner=grid.rank("tp") == 0)
    return {"dense": dense, "stack": ShardSpec(tuple(pieces), (here, 3, 5), ("edp",))}


def _one_step(level: str, degrees: dict[str, int]) -> None:
    grid = mesh(**degrees)
    rank, world = dist.get_rank(), dist.get_world_size()
    held = specs(grid)
    infos = [ParamInfo(n, nn.Parameter(torch.zeros(s.shape, dtype=torch.float64)), s, 0) for n, s in held.items()]
    engine = DataParallelEngine(infos, grid, DataParallelOptions(level=level))
    assert [bucket.layout.kind.data for bucket in engine.buckets] == [("edp",), ("dp", "cp")]
    optimizer = torch.optim.SGD([shard.master for shard in engine.shards], lr=1.0)
    engine.zero_grad()
    # ranks along tp see the same dense gradient; every rank has a term for each expert it holds
    state_of(infos[0].parameter).add(_values("dense", grid.rank("dp"), 7))
    state_of(infos[1].parameter).add(torch.stack([_values(piece.name, rank, 3, 5) for piece in held["stack"].pieces]))
    engine.finish_grad_sync()
    dense = torch.stack([_values("dense", place, 7) for place in range(grid.dp)]).sum(0)
    holders = {e: [r for r in range(world) if r % grid.ep == e * grid.ep // 4] for e in range(4)}
    experts = [torch.stack([_values(f"expert{e}", r, 3, 5) for r in holders[e]]).sum(0) for e in range(4)]
    assert_close(engine.grad_norm(), torch.cat([dense, torch.stack(experts).flatten()]).norm())
    optimizer.step()
    engine.publish()
    engine.sync_parameters()
    assert_close(infos[0].parameter.detach(), -dense)
    for piece in held["stack"].pieces:
        assert_close(piece.view(infos[1].parameter.detach()), -experts[int(piece.name[-1])])


@pytest.mark.parametrize("level", ["no_shard", "optim"])
def test_each_bucket_has_its_own_ranks(level: str) -> None:
    for degrees in ({"ep": 2}, {"ep": 4}, {"tp": 2, "ep": 2}):
        run(_one_step, 4, level, degrees)


def _two_models(level: str) -> None:
    """One is split over tp, the other is not: the same two ranks, two meshes, one engine and one norm."""
    rank = dist.get_rank()
    split, whole = mesh(tp=2), mesh()
    half = ShardSpec((ShardPiece("a", (4, 3), (2 * rank, 0), (2, 3)),), (2, 3))
    norm = split_spec("norm", (3,), partial=("tp",), owner=rank == 0)
    infos = [
        ParamInfo("a", nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)), half, 0, mesh=split),
        ParamInfo("norm", nn.Parameter(torch.zeros(3, dtype=torch.float64)), norm, 0, mesh=split),
        ParamInfo("b", nn.Parameter(torch.zeros(5, dtype=torch.float64)), split_spec("b", (5,)), 0, mesh=whole),
    ]
    engine = DataParallelEngine(infos, whole, DataParallelOptions(level=level))
    engine.zero_grad()
    terms = _values("a", 0, 4, 3)[2 * rank :][:2], _values("n", rank, 3), _values("b", rank, 5)
    for info, term in zip(infos, terms, strict=True):
        state_of(info.parameter).add(term)
    engine.finish_grad_sync()
    sums = [sum(_values(name, r, n) for r in range(2)) for name, n in (("n", 3), ("b", 5))]
    assert_close(engine.grad_norm(), torch.cat([_values("a", 0, 4, 3).flatten(), *sums]).norm())


@pytest.mark.parametrize("level", ["no_shard", "optim"])
def test_models_on_different_meshes_share_an_engine(level: str) -> None:
    run(_two_models, 2, level)


def test_the_specs_here_cover_the_mesh() -> None:
    for degrees in ({"ep": 2}, {"ep": 4}, {"tp": 2, "ep": 2}):
        grids = [ParallelMesh(4, rank, **degrees) for rank in range(4)]
        check_cover(grids[0], [specs(grid) for grid in grids])
