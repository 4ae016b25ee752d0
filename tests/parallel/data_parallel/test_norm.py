from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.ops.parameter import state_of
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo, clip_coefficient
from megalight.parallel.data_parallel.buffers import FlatShard
from megalight.parallel.data_parallel.grad_norm import global_norm
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardPiece, ShardSpec
from tests.parallel.data_parallel.helpers import assert_close, mesh, split_spec
from tests.support.workers import run


def _whole(name: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)


def _norm(level: str, tp: int, pp: int) -> None:
    """A split weight, a replicated norm, and a vocabulary padded from 7 rows to 8; every stage has its own."""
    grid = mesh(tp=tp, pp=pp)
    part, stage, world_dp = grid.rank("tp"), grid.rank("pp"), grid.size("dp")
    rows, share = 8 // tp, 12 // tp
    real = min(rows, 7 - rows * part)
    table = ShardSpec((ShardPiece("table", (7, 3), (rows * part, 0), (real, 3)),), (rows, 3))
    params = [
        (f"weight{stage}", split_spec(f"weight{stage}", (share, 5)), _whole("weight", 12, 5)[share * part :][:share]),
        (f"norm{stage}", split_spec("norm", (9,), owner=part == 0), _whole("norm", 9)),
        (f"table{stage}", table, torch.cat([_whole("table", 7, 3), torch.full((1, 3), 1e3)])[rows * part :][:rows]),
    ]
    held = [ParamInfo(name, nn.Parameter(torch.zeros_like(g)), spec, 0) for name, spec, g in params]
    engine = DataParallelEngine(held, grid, DataParallelOptions(level=level))
    engine.zero_grad()
    for info, (_, _, gradient) in zip(held, params, strict=True):
        state_of(info.parameter).add(gradient / world_dp)
    engine.finish_grad_sync()
    once = torch.cat([_whole("weight", 12, 5).flatten(), _whole("norm", 9), _whole("table", 7, 3).flatten()])
    with patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reductions:
        assert_close(engine.grad_norm(), once.norm() * pp**0.5)
    assert reductions.call_count == (grid.world_size > 1)


@pytest.mark.parametrize("level", ["no_shard", "optim"])
@pytest.mark.parametrize(("world", "tp", "pp"), [(1, 1, 1), (2, 2, 1), (4, 2, 1), (4, 2, 2), (4, 1, 2)])
def test_every_element_counts_once(world: int, tp: int, pp: int, level: str) -> None:
    run(_norm, world, level, tp, pp)


def test_runs_join_over_gaps_between_parameters() -> None:
    whole = ShardSpec.replicated("a", (60,))
    padded = ShardSpec((ShardPiece("b", (30,), (0,), (30,)),), (40,))
    other = ShardSpec((ShardPiece("c", (10,), (0,), (10,), 0, (), False), ShardPiece("d", (5,), (0,), (5,), 10)), (15,))
    slots = [(whole, 0), (padded, 64), (other, 128)]
    assert FlatShard(0, 0, 256, torch.zeros(256), slots).counted_runs() == [(0, 94), (104, 128), (138, 256)]
    assert FlatShard(0, 70, 130, torch.zeros(60), slots).counted_runs() == [(0, 24), (34, 58)]
    assert FlatShard(0, 128, 138, torch.zeros(10), slots).counted_runs() == []


def test_bfloat16_gradients_have_a_float32_norm() -> None:
    parameter = nn.Parameter(torch.zeros(1001, dtype=torch.bfloat16))
    info = ParamInfo("w", parameter, ShardSpec.replicated("w", (1001,)), 0)
    engine = DataParallelEngine([info], ParallelMesh(), DataParallelOptions(gradient_dtype="bfloat16"))
    state_of(parameter).add(torch.ones(1001))
    engine.finish_grad_sync()
    assert engine.grad_norm().dtype == torch.float32
    assert_close(engine.grad_norm(), torch.tensor(1001.0).sqrt(), 1e-6)


def test_clip_coefficient_equals_torch() -> None:
    for size in (0.1, 30.0):
        gradient = torch.full((9,), size)
        parameter = nn.Parameter(torch.zeros(9))
        parameter.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_([parameter], 1.5)
        assert torch.equal(gradient * clip_coefficient(norm, 1.5), parameter.grad)
    assert clip_coefficient(torch.tensor(float("nan")), 1.0).isnan()


def test_the_norm_of_many_elements_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(4_000_001, generator=generator), torch.randn(1000, 1500, generator=generator)]
    expected = float(sum(part.double().square().sum() for part in parts)) ** 0.5
    found = global_norm(parts, None, torch.device("cpu"))
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(expected, rel=5e-7)
