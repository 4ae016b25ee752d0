"""bfloat16 weights that are their own masters: every level updates them as one device does, rounded once a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.optim import Adam, shard_optimizer
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo
from megalight.parallel.data_parallel.buffers import check_masters
from megalight.parallel.data_parallel.layout import BucketKey
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from tests.parallel.data_parallel.helpers import accumulate, batches, build, loss, mesh
from tests.support.options import data_parallel
from tests.support.workers import run

STEPS, LR, DECAY, BETAS, EPS = 4, 0.02, 0.1, (0.9, 0.95), 1e-8


class Block(nn.Sequential):
    """A unit."""


def _model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    made = build(dtype)
    return nn.Sequential(Block(made[0], made[1]), nn.Identity(), Block(made[2], made[3]))


def _units(model: nn.Sequential, **options: Any) -> DataParallelEngine:
    given = data_parallel(**options)
    infos = [
        ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), 0, unit=int(name[0]) // 2)
        for name, p in model.named_parameters()
    ]
    return DataParallelEngine(infos, mesh(), given, units=[[model[0]], [model[2]]])


def _by_hand(world: int) -> list[Tensor]:
    """Gradients summed in float32, AdamW in float64, one rounding."""
    model = _model()
    parameters = list(model.parameters())
    moments = [(torch.zeros_like(p, dtype=torch.float64), torch.zeros_like(p, dtype=torch.float64)) for p in parameters]
    for step in range(STEPS):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        for rows in batches(step, world, 2, torch.bfloat16):
            ranks = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
            for x in rows:
                for total, gradient in zip(ranks, torch.autograd.grad(loss(model, x), parameters), strict=True):
                    total += gradient
            for total, part in zip(sums, ranks, strict=True):
                total += part
        with torch.no_grad():
            for p, g, (m, v) in zip(parameters, sums, moments, strict=True):
                m.mul_(BETAS[0]).add_(g.double(), alpha=1 - BETAS[0])
                v.mul_(BETAS[1]).addcmul_(g.double(), g.double(), value=1 - BETAS[1])
                first, second = m / (1 - BETAS[0] ** (step + 1)), v / (1 - BETAS[1] ** (step + 1))
                p.copy_(p.double() * (1 - LR * DECAY) - LR * first / (second.sqrt() + EPS))
    return [p.detach().float() for p in parameters]


def _trained(options: dict[str, Any]) -> tuple[list[Tensor], list[Any]]:
    model = _model()
    optimizer = Adam(model.parameters(), lr=LR, weight_decay=DECAY, betas=BETAS, eps=EPS)
    engine = _units(model, master_dtype="bfloat16", bucket_size=30, **options)
    shard_optimizer(optimizer, engine)
    for step in range(STEPS):
        accumulate(engine, model, batches(step, dist.get_world_size(), 2, torch.bfloat16)[dist.get_rank()])
        optimizer.step()
        engine.publish()
    engine.sync_parameters()
    state = [
        (bucket.shard.master.dtype, bucket.master_is_own_params, optimizer.state[bucket.shard.master]["exp_avg"].dtype)
        for bucket in engine.buckets
    ]
    if engine.units is not None:
        with engine.units.full_parameters():
            return [p.detach().float().clone() for p in model.parameters()], state
    return [p.detach().float().clone() for p in model.parameters()], state


@pytest.mark.parametrize(
    "options",
    [
        {"level": "no_shard"},
        {"level": "optim"},
        {"level": "optim_grads"},
        {"level": "optim_grads_params"},
        {"level": "optim", "optimizer_offload_fraction": 1.0},
    ],
    ids=str,
)
def test_every_level_updates_as_one_device_does(options: dict[str, Any]) -> None:
    expected = run(_by_hand, 1, 2)[0]
    for found, state in run(_trained, 2, options):
        away = "optimizer_offload_fraction" in options
        assert set(state) == {(torch.bfloat16, not away, torch.float32)}
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_masters_that_cannot_hold_the_weights_are_refused() -> None:
    half, full = BucketKey(torch.bfloat16, torch.float32, 0), BucketKey(torch.float32, torch.float32, 0)
    check_masters([half, full], torch.bfloat16)
    check_masters([], torch.bfloat16)
    for dtype in (torch.float32, torch.float16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(ConfigurationError, match=f"master_dtype='bfloat16' and weights in {name}, whose values"):
            check_masters([BucketKey(dtype, torch.float32, 0)], torch.bfloat16)
    with pytest.raises(ConfigurationError, match="weights stored in FP8"):
        check_masters([BucketKey(torch.bfloat16, torch.float32, 0, storage_format="e4m3")], torch.bfloat16)
    with pytest.raises(ConfigurationError, match="master_dtype='float16'; it must be one of float32, bfloat16"):
        DataParallelOptions(master_dtype="float16")  # type: ignore[arg-type]


def test_weights_of_another_dtype_keep_their_own_masters() -> None:
    model = _model()
    model[0][1].float()  # a norm in float32
    engine = DataParallelEngine(
        [ParamInfo(n, p, ShardSpec.replicated(n, tuple(p.shape)), 0) for n, p in model.named_parameters()],
        ParallelMesh(),
        DataParallelOptions(level="no_shard", master_dtype="bfloat16"),
    )
    assert {bucket.shard.master.dtype for bucket in engine.buckets} == {torch.bfloat16, torch.float32}
    assert all(bucket.master_is_own_params for bucket in engine.buckets)
