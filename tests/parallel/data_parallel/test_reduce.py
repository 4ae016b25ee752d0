from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalight.errors import ConfigurationError, LayoutError
from megalight.ops.parameter import state_of
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo
from megalight.parallel.data_parallel.buffers import FlatShard
from megalight.parallel.data_parallel.reduce import partial_runs
from megalight.parallel.shard import ShardPiece, ShardSpec
from tests.parallel.data_parallel.helpers import assert_close, infos, mesh, split_spec
from tests.support.options import data_parallel
from tests.support.workers import run


def _flat_gradient(size: int, rank: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _reduced(
    level: str, grad_dtype: torch.dtype, reduce_dtype: torch.dtype | None, reduction: str
) -> tuple[torch.Tensor, ...]:
    """This rank's part of the summed gradients, and that part of the exact sum."""
    world, rank, size = dist.get_world_size(), dist.get_rank(), 1001
    model = nn.Linear(size, 1, bias=False).bfloat16()
    engine = DataParallelEngine(
        infos(model),
        mesh(),
        data_parallel(
            level=level,
            gradient_dtype=str(grad_dtype).removeprefix("torch."),
            reduce_dtype=reduce_dtype and str(reduce_dtype).removeprefix("torch."),
            reduce_scatter_with_fp32_accumulation=reduction != "sum",
        ),
    )
    engine.zero_grad()
    state_of(model.weight).add(_flat_gradient(size, rank).view(1, -1))
    engine.finish_grad_sync()
    (shard,) = engine.shards
    exact = torch.stack([_flat_gradient(size, r).to(grad_dtype).double() for r in range(world)]).sum(0)
    ((_, first, last, start),) = shard.intervals()
    assert shard.master.grad is not None
    return shard.master.grad[start : start + last - first], exact[first:last]


def _reductions(world: int) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    for level, grad_dtype, reduce_dtype, reduction, tolerance in (
        ("optim", fp32, None, "sum", 1e-6),
        ("optim", fp32, bf16, "sum", 1e-2),
        ("optim", bf16, fp32, "sum", 1e-6),
        ("optim", bf16, None, "accumulate_fp32", 1e-6),
        ("optim", fp32, bf16, "accumulate_fp32", 1e-2),
        ("no_shard", fp32, bf16, "sum", 1e-2),
        ("no_shard", bf16, fp32, "sum", 1e-2),
    ):
        actual, exact = _reduced(level, grad_dtype, reduce_dtype, reduction)
        assert actual.dtype == fp32
        assert_close(actual, exact, tolerance)
    naive, exact = _reduced("optim", bf16, None, "sum")
    error = (naive.double() - exact).norm() / exact.norm()
    assert error > 1e-4  # what accumulate_fp32 is for


@pytest.mark.parametrize("world", [2, 4])
def test_dtypes_on_the_wire(world: int) -> None:
    run(_reductions, world, world)


def test_fp32_accumulation_needs_shards() -> None:
    with pytest.raises(ConfigurationError, match="level 'no_shard' all-reduces them; use level 'optim'"):
        DataParallelOptions(level="no_shard", reduce_scatter_with_fp32_accumulation=True)


def _partial(level: str) -> None:
    """tp 2 x dp: a norm partial over tp, a fused weight of which one section is partial, a whole one."""
    grid = mesh(tp=2)
    rank = dist.get_rank()
    whole = ShardPiece("q", (4, 5), (2 * grid.rank("tp"), 0), (2, 5), 0)
    replicated = ShardPiece("k", (2, 5), (0, 0), (2, 5), 10, ("tp",), grid.rank("tp") == 0)
    params = [
        ParamInfo("norm", nn.Parameter(torch.zeros(45).double()), split_spec("norm", (45,), partial=("tp",)), 0),
        ParamInfo("qk", nn.Parameter(torch.zeros(4, 5).double()), ShardSpec((whole, replicated), (4, 5)), 0),
        ParamInfo("plain", nn.Parameter(torch.zeros(77).double()), split_spec("plain", (77,)), 0),
    ]
    engine = DataParallelEngine(params, grid, DataParallelOptions(level=level))
    engine.zero_grad()
    for number, info in enumerate(params):
        state_of(info.parameter).add(torch.full_like(info.parameter, (number + 1) * 10.0**rank))
    engine.finish_grad_sync()
    over_dp = sum(10.0**r for r in grid.ranks("dp"))
    over_all = sum(10.0**r for r in range(dist.get_world_size()))
    expected = {"norm": over_all, "q": 2 * over_dp, "k": 2 * over_all, "plain": 3 * over_dp}
    for shard in engine.shards:
        for piece, first, last, start in shard.intervals():
            assert shard.master.grad is not None
            part = shard.master.grad[start : start + last - first]
            assert torch.equal(part, torch.full_like(part, expected[piece.name])), piece.name


@pytest.mark.parametrize("level", ["no_shard", "optim"])
@pytest.mark.parametrize("world", [2, 4])
def test_partial_gradients_are_summed_over_their_axes(world: int, level: str) -> None:
    run(_partial, world, level)


def _kv_replicas() -> None:
    """tp 4 with two KV heads: neighbors hold the same head, and sum over the factored axis only."""
    grid = mesh(tp=4)
    parameter = nn.Parameter(torch.zeros(6).double())
    head = grid.rank("tp/2")
    spec = ShardSpec((ShardPiece("k", (12,), (6 * head,), (6,), 0, ("tp%2",), grid.rank("tp%2") == 0),), (6,))
    engine = DataParallelEngine([ParamInfo("k", parameter, spec, 0)], grid)
    engine.zero_grad()
    state_of(parameter).add(torch.full_like(parameter, 10.0 ** dist.get_rank()))
    engine.finish_grad_sync()
    expected = (11.0, 1100.0)
    assert torch.equal(parameter.main_grad, torch.full((6,), expected[head]).double())  # type: ignore[attr-defined]
    assert_close(engine.grad_norm(), (torch.tensor(expected).double() * 6**0.5).norm())


def test_partial_over_a_factored_axis() -> None:
    run(_kv_replicas, 4)


def _uneven() -> str:
    grid = mesh(tp=2)
    size = 5 + grid.rank("tp")
    spec = split_spec("norm", (size,), partial=("tp",))
    with pytest.raises(LayoutError) as error:
        DataParallelEngine([ParamInfo("norm", nn.Parameter(torch.zeros(size)), spec, 0)], grid)
    return str(error.value)


def test_ranks_that_disagree_about_partial_gradients_are_refused() -> None:
    assert "along tp keep different parts of partial gradients" in run(_uneven, 2)[0]


def test_neighboring_partial_pieces_are_one_run() -> None:
    spec = ShardSpec(
        (ShardPiece("a", (4,), (0,), (4,), 0, ("tp",)), ShardPiece("b", (6,), (0,), (6,), 4, ("tp",))), (10,)
    )
    shard = FlatShard(0, 2, 130, torch.zeros(128), [(spec, 0), (spec, 64)])
    assert partial_runs({0: shard, 1: shard}) == {("tp",): [(0, 0, 8), (0, 62, 72), (1, 0, 8), (1, 62, 72)]}
