"""Masters and optimizer state in host memory train the same model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.optim import Adam, offload_to_cpu, restore_from_cpu, shard_optimizer
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, clip_coefficient
from megalight.parallel.data_parallel.layout import BucketKey, plan_buckets
from megalight.parallel.data_parallel.parameters import offloaded
from tests.parallel.data_parallel.helpers import accumulate, assert_models_close, batches, build, infos, loss, mesh
from tests.support.options import data_parallel
from tests.support.workers import run

STEPS = 3


def _engine(model: nn.Module, fraction: float, **options: Any) -> DataParallelEngine:
    given = data_parallel(optimizer_offload_fraction=fraction, bucket_size=30, **options)
    return DataParallelEngine(infos(model, lambda name: int("bias" in name)), mesh(), given)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": [p for name, p in named if ("bias" in name) == bias]} for bias in (False, True)]


def _train(model: nn.Module, engine: DataParallelEngine, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        dtype = next(model.parameters()).dtype
        accumulate(engine, model, batches(step, dist.get_world_size(), 2, dtype)[dist.get_rank()])
        engine.scale_gradients(clip_coefficient(engine.grad_norm(), 5.0))
        optimizer.step()
        engine.publish()
    engine.sync_parameters()


def _reference(steps: int) -> nn.Module:
    model = build()
    optimizer = torch.optim.AdamW(_groups(model), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for x in batches(step, dist.get_world_size(), 2).flatten(0, 1):
            loss(model, x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    return model


def _equals_one_process(level: str) -> None:
    expected = _reference(STEPS)
    for fraction, kind in itertools.product((0.4, 1.0), (Adam, torch.optim.AdamW)):
        model = build()
        optimizer = kind(_groups(model), lr=0.01)
        engine = _engine(model, fraction, level=level)
        away = engine.host.buckets
        assert away
        assert (len(away) < len(engine.buckets)) == (fraction < 1)
        pointers = {bucket: bucket.own_params.data_ptr() for bucket in away}
        shard_optimizer(optimizer, engine)
        _train(model, engine, optimizer, range(STEPS - 1))
        for bucket in away:
            master = bucket.shard.master
            assert master.data_ptr() != bucket.own_params.data_ptr() == pointers[bucket], "a copy, and always this one"
            assert torch.equal(master, bucket.own_params)
        # Another engine, with other masters on the host, takes over in the middle of the run.
        engine.close()
        other = _engine(model, 1.2 - fraction if fraction < 1 else 0.0, level=level)
        engine.give_masters(other)
        shard_optimizer(optimizer, other)
        _train(model, other, optimizer, range(STEPS - 1, STEPS))
        assert_models_close(model, expected)
        states = [optimizer.state[shard.master] for shard in other.shards]
        assert all(float(state["step"]) == STEPS for state in states)


@pytest.mark.parametrize(("level", "world"), [("optim", 2), ("no_shard", 2), ("optim", 1)])
def test_equals_one_process(level: str, world: int) -> None:
    run(_equals_one_process, world, level)


def _low_precision(grad_dtype: str) -> None:
    """The host rounds as the device does: everything is bit-equal, whatever is offloaded."""
    found: list[list[Tensor]] = []
    for fraction in (0.0, 0.4, 1.0):
        model = build(torch.bfloat16)
        optimizer = Adam(_groups(model), lr=0.01)
        engine = _engine(model, fraction, gradient_dtype=grad_dtype)
        shard_optimizer(optimizer, engine)
        _train(model, engine, optimizer, range(STEPS))
        for bucket in engine.buckets:
            assert torch.equal(bucket.own_params, bucket.shard.master.detach().bfloat16())
        found.append([*model.parameters(), *(shard.master for shard in engine.shards)])
        with torch.no_grad():
            for shard in engine.shards:  # what others write to masters is published as well
                shard.master.fill_(3.0)
        engine.publish()
        engine.sync_parameters()
        assert all(torch.equal(p, torch.full_like(p, 3.0)) for p in model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():  # weights that are loaded reach masters on the host
                parameter.fill_(2.0)
        engine.refresh_masters()
        for shard in engine.shards:
            for piece, first, last, start in shard.intervals():
                part = shard.master.detach()[start : start + last - first]
                assert torch.equal(part, torch.full_like(part, 2.0)), piece.name
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
def test_low_precision_is_bit_equal(grad_dtype: str) -> None:
    run(_low_precision, 2, grad_dtype)


def _skipped_and_moved() -> None:
    """A step without gradients changes nothing, and state on the host may be moved there once more."""
    model = build(torch.bfloat16)
    optimizer = Adam(_groups(model), lr=0.01)
    engine = _engine(model, 0.4)
    shard_optimizer(optimizer, engine)
    _train(model, engine, optimizer, range(1))
    before = [shard.master.detach().clone() for shard in engine.shards]
    engine.zero_grad()
    optimizer.step()
    engine.publish()
    assert all(torch.equal(old, shard.master) for old, shard in zip(before, engine.shards, strict=True))
    offload_to_cpu(optimizer)
    restore_from_cpu(optimizer)
    _train(model, engine, optimizer, range(1, 2))
    assert engine.memory()["host"] > 0


def test_steps_without_gradients_and_state_that_moves() -> None:
    run(_skipped_and_moved, 1)


def test_whole_buckets_make_up_the_fraction() -> None:
    layouts = plan_buckets([100, 100, 300], [BucketKey(torch.float32, torch.float32, group) for group in (0, 1, 2)])
    sizes = [layout.numel for layout in layouts]
    assert offloaded(layouts, 0.0) == set()
    assert offloaded(layouts, 1.0) == {0, 1, 2}
    for fraction in (0.1, 0.5, 0.9):
        chosen = offloaded(layouts, fraction)
        assert sum(sizes[index] for index in chosen) >= fraction * sum(sizes)
        assert sum(sizes[index] for index in sorted(chosen)[:-1]) < fraction * sum(sizes)


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_fractions_are_checked(fraction: float) -> None:
    with pytest.raises(ConfigurationError, match=r"optimizer_offload_fraction=.*must be between 0"):
        DataParallelOptions(optimizer_offload_fraction=fraction)
