from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.optim import (
    Adam,
    LinearDecay,
    Muon,
    Shampoo,
    WholeMatrixOptimizer,
    offload_to_cpu,
    parameter_groups,
    restore_from_cpu,
    shard_optimizer,
)
from megalight.optim.sharded import ELEMENTWISE, sharding_of
from megalight.parallel.data_parallel import DataParallelEngine, clip_coefficient
from megalight.parallel.mesh import ParallelMesh
from tests.parallel.data_parallel.helpers import (
    accumulate,
    assert_models_close,
    batches,
    build,
    infos,
    loss,
    mesh,
)
from tests.support.options import data_parallel
from tests.support.workers import run

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "NAdam": {"decoupled_weight_decay": True},
    "Muon": {"ns_dtype": "float64"},
    "Shampoo": {"dtype": torch.float64, "root_every": 1, "root_eps": 1e-3},
}


def _make(kind: type[torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    groups = parameter_groups(model.named_parameters(), lr=0.01, weight_decay=0.1)
    if kind is torch.optim.Rprop:
        for group in groups:
            del group["weight_decay"]
    if issubclass(kind, WholeMatrixOptimizer):
        groups[0]["whole_matrices"] = True  # the others are vectors
    return kind(groups, **OPTIONS.get(kind.__name__, {}))


def _engine(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> DataParallelEngine:
    home = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names = {name: home.get(id(p), 0) for name, p in model.named_parameters()}
    grid = mesh() if dist.is_initialized() else ParallelMesh()
    return DataParallelEngine(infos(model, names.__getitem__), grid, data_parallel(**options))


def _every_optimizer(level: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for kind in (*ELEMENTWISE, Adam):
        model, reference = build(), build()
        optimizer, expected = _make(kind, model), _make(kind, reference)
        groups, scheduler = optimizer.param_groups, LinearDecay(warmup=2, steps=9).build(optimizer)
        expected_scheduler = LinearDecay(warmup=2, steps=9).build(expected)
        engine = _engine(model, optimizer, level=level, bucket_size=30)
        assert shard_optimizer(optimizer, engine) is optimizer
        assert optimizer.param_groups is groups
        for step in range(4):
            inputs = batches(step, world, 1)
            expected.zero_grad()
            loss(reference, inputs).backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 5.0)
            expected.step()
            expected_scheduler.step()
            accumulate(engine, model, inputs[rank])
            assert abs(engine.grad_norm() - norm) <= 1e-9 * norm
            engine.scale_gradients(clip_coefficient(engine.grad_norm(), 5.0))
            optimizer.step()
            scheduler.step()
            engine.publish()
        engine.sync_parameters()
        assert_models_close(model, reference)


@pytest.mark.parametrize(
    ("level", "world"), [("optim", 1), ("optim", 2), pytest.param("no_shard", 2, marks=pytest.mark.full)]
)
def test_every_elementwise_optimizer_trains_like_one_process(level: str, world: int) -> None:
    run(_every_optimizer, world, level)


def test_low_precision_parameters_follow_in_adams_own_pass() -> None:
    model, other = build(torch.bfloat16), build(torch.bfloat16)
    ours, plain = _make(Adam, model), _make(torch.optim.AdamW, other)
    engines = _engine(model, ours), _engine(other, plain)
    for optimizer, engine, net in zip((ours, plain), engines, (model, other), strict=True):
        shard_optimizer(optimizer, engine)
        for step in range(3):
            accumulate(engine, net, batches(step, 1, 2, torch.bfloat16)[0])
            engine.scale_gradients(clip_coefficient(engine.grad_norm(), 1.0))
            optimizer.step()
            if optimizer is ours:
                for bucket in engine.buckets:
                    assert torch.equal(bucket.own_params, bucket.shard.master.detach().bfloat16())
            engine.publish()
    assert_models_close(model, other, 1e-3)
    for shard in engines[0].shards:  # what others write to masters is published as well
        shard.master.data.fill_(3.0)
    engines[0].publish()
    assert all(torch.equal(p, torch.full_like(p, 3.0)) for p in model.parameters())


def test_bfloat16_gradients_reach_adam_unconverted() -> None:
    model = build(torch.bfloat16)
    optimizer = _make(Adam, model)
    engine = _engine(model, optimizer, gradient_dtype="bfloat16")
    shard_optimizer(optimizer, engine)
    accumulate(engine, model, batches(0, 1, 1, torch.bfloat16)[0])
    before = [shard.master.detach().clone() for shard in engine.shards]
    for bucket in engine.buckets:
        assert bucket.shard.master.grad is not None
        assert bucket.shard.master.grad.data_ptr() == bucket.grads.data_ptr()
    optimizer.step()
    assert all(not torch.equal(old, shard.master) for old, shard in zip(before, engine.shards, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_optimizers_that_are_not_elementwise_are_refused(kind: type[torch.optim.Optimizer]) -> None:
    model = build()
    optimizer = kind(model.parameters())  # type: ignore[call-arg]
    with pytest.raises(
        ConfigurationError,
        match=f"{kind.__name__} is not known to update each element of [0-9a-z.]+ only.*set elementwise = True",
    ):
        shard_optimizer(optimizer, _engine(model, optimizer))


def test_users_declare_their_own() -> None:
    class Mine(torch.optim.SGD):
        pass

    model = build()
    optimizer = Mine(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="Mine is not known"):
        shard_optimizer(optimizer, _engine(model, optimizer))
    Mine.elementwise = True  # type: ignore[attr-defined]
    shard_optimizer(optimizer, _engine(model, optimizer))


def test_groups_must_be_those_of_the_engine() -> None:
    model = build()
    partial = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    with pytest.raises(ConfigurationError, match=r"0\.weight requires gradients, but the optimizer does not hold it"):
        shard_optimizer(partial, _engine(model, partial))
    grouped = _make(torch.optim.SGD, model)
    with pytest.raises(ConfigurationError, match="in group 1 of the optimizer, but in group 0"):
        shard_optimizer(grouped, DataParallelEngine(infos(model), ParallelMesh()))
    foreign = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigurationError, match="holds 1 trainable tensors that are not parameters"):
        shard_optimizer(foreign, _engine(model, foreign))


def test_frozen_parameters_and_names_in_groups_are_dropped() -> None:
    model = build()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    shard_optimizer(optimizer, _engine(model, optimizer))
    state = optimizer.state_dict()
    assert state["param_groups"][0]["params"] == [0], "one flat shard"
    optimizer.load_state_dict(state)
    (group,) = optimizer.param_groups
    assert list(map(id, group["params"])) == list(map(id, model.parameters())), "between steps"
    assert group["param_names"] == [name for name, _ in model.named_parameters()]


def test_parameters_added_later_are_refused() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = _engine(model, optimizer)
    shard_optimizer(optimizer, engine)
    accumulate(engine, model, batches(0, 1, 1)[0])
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ConfigurationError, match=r"added to the optimizer after training began.*when training begins"):
        optimizer.step()


def test_state_that_exists_moves_along() -> None:
    model, reference = build(), build()
    optimizer, expected = _make(torch.optim.AdamW, model), _make(torch.optim.AdamW, reference)
    for net, each in ((model, optimizer), (reference, expected)):
        loss(net, batches(0, 1, 1)).backward()
        each.step()
        each.zero_grad()
    engine = _engine(model, optimizer, bucket_size=30)
    shard_optimizer(optimizer, engine)
    accumulate(engine, model, batches(1, 1, 1)[0])
    loss(reference, batches(1, 1, 1)).backward()
    for each in (optimizer, expected):
        each.step()
    assert_models_close(model, reference)


def _partly(model: nn.Module, x: Tensor, step: int) -> Tensor:
    """The loss of a step that uses the last layer every second time, and trains the norm after the first step."""
    model[1].requires_grad_(step > 0)  # type: ignore[index]
    found: Tensor = (model if step % 2 else model[:2])(x).square().sum()  # type: ignore[index]
    return found


def _skipping(level: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for kind in (*ELEMENTWISE, Adam, Muon, Shampoo):
        model, reference = build(), build()
        optimizer, expected = _make(kind, model), _make(kind, reference)
        engine = _engine(model, optimizer, level=level, bucket_size=200, find_unused_parameters=True)
        shard_optimizer(optimizer, engine)
        for step in range(6):
            if step == 4:  # states survive another engine
                engine.sync_parameters()
                engine = _engine(model, optimizer, level=level, find_unused_parameters=True)
                shard_optimizer(optimizer, engine)
            inputs = batches(step, world, 1)
            expected.zero_grad()
            # The last layer has a gradient on one rank only in steps that use it.
            sum(_partly(reference, x, step if r == 0 else 2 * step) for r, x in enumerate(inputs)).backward()  # type: ignore[union-attr]
            expected.step()
            engine.zero_grad()
            with engine.micro_batches(1):
                _partly(model, inputs[rank][0], step if rank == 0 else 2 * step).backward()
            engine.finish_grad_sync()
            optimizer.step()
            engine.publish()
        engine.sync_parameters()
        assert_models_close(model, reference)


@pytest.mark.parametrize(
    ("level", "world"), [("optim", 1), ("optim", 2), pytest.param("no_shard", 2, marks=pytest.mark.full)]
)
def test_parameters_without_a_gradient_are_left_as_they_are(level: str, world: int) -> None:
    run(_skipping, world, level)


def _narrow(parts: bool) -> tuple[list[Tensor], list[int]]:
    """Train bfloat16 weights on masters in host memory, with moments in 8 bits."""
    model = build(torch.bfloat16)
    optimizer = Adam(model.parameters(), lr=0.01, exp_avg_dtype="float8", exp_avg_sq_dtype="bfloat16")
    engine = _engine(model, optimizer, optimizer_offload_fraction=1.0, find_unused_parameters=True)
    shard_optimizer(optimizer, engine)
    for step in range(4):
        if step == 2:
            offload_to_cpu(optimizer)
            restore_from_cpu(optimizer)
        engine.zero_grad()
        with engine.micro_batches(1):
            _partly(model, batches(0, 1, 1, torch.bfloat16)[0][0], step if parts else 1).backward()
        engine.finish_grad_sync()
        optimizer.step()
        engine.publish()
    engine.sync_parameters()
    sharding = sharding_of(optimizer)
    assert sharding is not None
    for bucket in engine.buckets:
        assert torch.equal(bucket.own_params, bucket.shard.master.detach().bfloat16())
    steps = [int(optimizer.state[shard.master]["step"]) for shard in sharding.shards]
    return [p.detach().float() for p in model.parameters()], steps


def test_parts_of_narrow_masters_in_host_memory() -> None:
    whole, counts = _narrow(False)
    assert counts == [4]
    parts, counts = _narrow(True)
    assert counts == [2, 3, 4], "last layer, norm, first layer"
    start = build(torch.bfloat16)
    for before, one, other in zip(start.parameters(), whole, parts, strict=True):
        assert (
            0 < (other - before.detach().float()).abs().max() < 2 * (one - before.detach().float()).abs().max() + 0.01
        )
