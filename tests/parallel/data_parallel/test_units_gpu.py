"""Units over NCCL: gathers and reductions on streams of their own, under layers that take long."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.nn.linear import Linear
from megalight.optim import Adam, shard_optimizer
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo, clip_coefficient
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.run_engine import owned_alone, units_of
from megalight.parallel.shard import ShardSpec
from tests.parallel.data_parallel.helpers import assert_close
from tests.support.nccl import runs_of
from tests.support.options import data_parallel

pytestmark = pytest.mark.gpu
WIDTH, LAYERS = 2048, 6


class Block(nn.Module):
    """Products that take long beside the messages, with fused weight gradients and autograd's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.down(torch.tanh(self.up(self.norm(x))))


def _model() -> nn.ModuleDict:
    torch.manual_seed(3)
    blocks = nn.ModuleList(Block() for _ in range(LAYERS))
    model = nn.ModuleDict({"layers": blocks, "head": nn.Linear(WIDTH, 1)})
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(parameter.numel() % 97))
    return model.cuda().bfloat16()


def _loss(model: nn.ModuleDict, x: Tensor) -> Tensor:
    for layer in model["layers"]:  # type: ignore[attr-defined]
        x = layer(x)
    loss: Tensor = model["head"](x).float().square().mean()
    return loss


def train(level: str, strict: bool, replicate: int = 1, **more: Any) -> tuple[Tensor, Tensor, int]:
    """Norms of five steps, the last loss, and the peak of memory in the last step. ``more``: of data parallelism."""
    gc.collect()  # an earlier engine's memory must not count
    model, world = _model(), dist.get_world_size()
    units = units_of(model)
    numbers = owned_alone(model, units)
    infos = [
        ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), 0, unit=numbers.get(id(p)))
        for name, p in model.named_parameters()
    ]
    # torch counts no memory that the GPUs share, so peaks are those of plain gathers.
    gathers = "auto" if strict else "plain"
    options = data_parallel(level=level, gathers=gathers, replicate=replicate, **more)
    engine = DataParallelEngine(infos, ParallelMesh(world, dist.get_rank()), options, units=units)
    optimizer = shard_optimizer(Adam(model.parameters(), lr=1e-3), engine)
    draws = torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randn(2, 4096, WIDTH, generator=draws).cuda().bfloat16() for _ in range(5)]
    one = torch.ones((), device="cuda")
    norms, loss = [], one
    for step, x in enumerate(inputs):
        if step == 4:
            torch.cuda.reset_peak_memory_stats()
        if strict and step == 3:
            torch.cuda.set_sync_debug_mode("error")
        engine.zero_grad()
        with engine.micro_batches(len(x)):
            for rows in x:
                loss = _loss(model, rows)
                loss.backward()
        engine.finish_grad_sync()
        norms.append(engine.grad_norm())
        engine.scale_gradients(clip_coefficient(norms[-1], 1.0) * one)
        optimizer.step()
        engine.publish()
    torch.cuda.set_sync_debug_mode("default")
    engine.sync_parameters()
    engine.close()
    return torch.stack(norms).cpu(), loss.detach().cpu(), torch.cuda.max_memory_allocated()


def _read_between_steps(level: str) -> Tensor:
    """All weights after each of three steps, read while everything is whole; the norms of layers are frozen."""
    model, world = _model(), dist.get_world_size()
    for layer in model["layers"]:  # type: ignore[attr-defined]
        layer.norm.requires_grad_(False)
    units = units_of(model)
    numbers = owned_alone(model, units)
    infos = [
        ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), 0, unit=numbers.get(id(p)))
        for name, p in model.named_parameters()
    ]
    engine = DataParallelEngine(
        infos, ParallelMesh(world, dist.get_rank()), DataParallelOptions(level=level), units=units
    )
    optimizer = shard_optimizer(Adam(model.parameters(), lr=1e-3), engine)
    draws = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(3):
        engine.zero_grad()
        with engine.micro_batches(1):
            _loss(model, torch.randn(1024, WIDTH, generator=draws).cuda().bfloat16()).backward()
        engine.finish_grad_sync()
        optimizer.step()
        engine.publish()
        engine.gather_parameters()
        seen.append(torch.cat([p.detach().reshape(-1)[::997].float() for p in model.parameters()]))
        engine.release_parameters()
    return torch.stack(seen).cpu()


def _dropped() -> int:
    """Use the memory of runs again that were dropped while units were on their way; return how much was overwritten."""
    wrong = 0
    for _ in range(3):
        model, world = _model(), dist.get_world_size()
        units = units_of(model)
        numbers = owned_alone(model, units)
        infos = [
            ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), 0, unit=numbers.get(id(p)))
            for name, p in model.named_parameters()
        ]
        engine = DataParallelEngine(
            infos, ParallelMesh(world, dist.get_rank()), DataParallelOptions(level="optim_grads_params"), units=units
        )
        whole = [(bucket.params.numel(), bucket.params.dtype) for bucket in engine.units.buckets]  # type: ignore[union-attr]
        torch.cuda.synchronize()
        engine.publish()
        del model, units, numbers, infos, engine
        gc.collect()
        again = [torch.zeros(size, dtype=dtype, device="cuda") for size, dtype in whole]
        torch.cuda.synchronize()
        wrong += sum(int(flat.count_nonzero()) for flat in again)
    return wrong


def jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    levels = ("optim", "optim_grads", "optim_grads_params")
    trained = [(train, (level, strict)) for strict in (False, True) for level in levels]
    trained += [(train, (levels[-1], False, 2))] * (world > 2)
    return [*trained, *((_read_between_steps, (level,)) for level in levels[::2]), (_dropped, ())]


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("level", ["optim_grads", "optim_grads_params"])
def test_gpus_train_as_without_units(level: str, strict: bool, world: int) -> None:
    """The same norms and loss as on level ``optim``, with less memory; ``strict``: the host never waits."""
    runs = runs_of(jobs, world)
    norms, loss, peak = runs.outcome(("optim", False))
    found_norms, found_loss, found_peak = runs.outcome((level, strict))
    assert_close(found_norms, norms, 1e-2)
    assert_close(found_loss, loss, 2e-2)
    assert strict or found_peak < peak


@pytest.mark.parametrize("world", [4, 8])
def test_two_groups_that_shard_train_as_one(world: int) -> None:
    """HSDP: each of two groups of GPUs holds all shards."""
    runs = runs_of(jobs, world)
    norms, loss, _ = runs.outcome(("optim", False))
    found_norms, found_loss, _ = runs.outcome(("optim_grads_params", False, 2))
    assert_close(found_norms, norms, 1e-2)
    assert_close(found_loss, loss, 2e-2)


def test_weights_read_between_steps_are_those_of_level_optim() -> None:
    """Gathered while the next units are already being fetched, and released again."""
    runs = runs_of(jobs, 2)
    found, expected = runs.outcome(("optim_grads_params",)), runs.outcome(("optim",))
    assert torch.isfinite(found).all()
    assert_close(found, expected, 1e-2)


def test_memory_of_a_dropped_run_is_used_again_after_the_last_gather() -> None:
    assert runs_of(jobs, 2).outcome(()) == 0
