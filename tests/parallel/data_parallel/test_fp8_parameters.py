"""Weights that live quantized in the buffers of one process; whole runs, on several ranks, are tests of strategies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalight.ops import adam as quantized_out
from megalight.ops.linear import linear
from megalight.ops.linear.low_precision import LowPrecision, Session, precision_of
from megalight.ops.parameter import state_of
from megalight.ops.quantize import Quantized, quantize
from megalight.ops.quantize.recipes import recipe
from megalight.optim import Adam, shard_optimizer
from megalight.optim.adam import MomentDtype
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.run_engine import owned_alone, units_of
from megalight.parallel.shard import ShardSpec
from tests.parallel.data_parallel.helpers import mesh
from tests.support.workers import run

SHAPES = {"up": (48, 16), "down": (16, 48), "norm": (16,)}


def build(
    bucket_size: int = 1 << 20,
    primary: bool | None = True,
    name: str = "tensorwise",
    over: ParallelMesh | None = None,
) -> tuple[dict[str, nn.Parameter], DataParallelEngine, Session]:
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for name, shape in SHAPES.items()
    }
    session = Session()
    for weight in ("up", "down"):
        precision = LowPrecision(recipe(name), session, emulate=True, primary=primary)
        state_of(parameters[weight]).precision = precision
    infos = [ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), 0) for name, p in parameters.items()]
    return (
        parameters,
        DataParallelEngine(infos, over or ParallelMesh(), DataParallelOptions(bucket_size=bucket_size)),
        session,
    )


def held(parameter: nn.Parameter) -> Quantized:
    precision = precision_of(parameter)
    assert precision is not None
    assert precision.scale is not None
    return Quantized(parameter.detach(), precision.scale, precision.recipe.weight)


def masters(engine: DataParallelEngine) -> dict[str, Tensor]:
    return {
        info.name: bucket.shard.part(slot.start, slot.stop).view(info.parameter.shape)
        for bucket in engine.buckets
        for info, slot in zip(bucket.infos, bucket.layout.slots, strict=True)
    }


def check(parameters: dict[str, nn.Parameter], engine: DataParallelEngine) -> None:
    """Quantized values and scales are those of the masters."""
    values = masters(engine)
    for name in ("up", "down"):
        expected, found = quantize(values[name], recipe("tensorwise").weight), held(parameters[name])
        assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(found.scale, expected.scale)


def test_scales_begin_where_cublas_reads_them() -> None:
    parameters, _, _ = build()
    assert [held(parameters[name]).scale.data_ptr() % 16 for name in ("up", "down")] == [0, 0]


@pytest.mark.parametrize("bucket_size", [1, 1 << 20])
def test_quantized_values_follow_the_masters(bucket_size: int) -> None:
    parameters, engine, session = build(bucket_size)
    before = {name: value.clone() for name, value in masters(engine).items()}
    check(parameters, engine)
    assert {p.dtype for p in parameters.values()} == {torch.float8_e4m3fn, torch.bfloat16}
    optimizer = shard_optimizer(Adam(parameters.values(), lr=0.1), engine)
    x = torch.randn(8, 16).bfloat16()
    engine.zero_grad()
    with session.step(0), engine.micro_batches(2):
        for _ in range(2):
            linear(linear(x, parameters["up"]), parameters["down"]).mul(parameters["norm"]).sum().backward()
    engine.finish_grad_sync()
    optimizer.step()
    engine.publish()
    check(parameters, engine)
    for name, value in masters(engine).items():
        assert not torch.equal(value, before[name])
    assert torch.equal(parameters["norm"].float(), masters(engine)["norm"].bfloat16().float())


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
@pytest.mark.parametrize(("primary", "each"), [(None, 2), (False, 4)])
def test_a_step_keeps_two_bytes_of_each_weight(name: str, primary: bool | None, each: int) -> None:
    """Quantized weights and their transposes; without them in place of weights, these come on top of bf16."""
    parameters, _, session = build(primary=primary, name=name)
    up, down = parameters["up"], parameters["down"]
    with session.step(0):
        linear(linear(torch.randn(16, 16).bfloat16().requires_grad_(), up), down).sum().backward()
        held: dict[int, int] = {}
        for parameter in (up, down):
            precision = precision_of(parameter)
            assert precision is not None
            assert precision._weight is not None
            for tensor in (parameter, *(quantized.data for quantized in precision._weight)):
                held[tensor.data_ptr()] = tensor.nbytes
    assert sum(held.values()) == each * (up.numel() + down.numel())


@pytest.mark.parametrize("bucket_size", [1, 1 << 20])
@pytest.mark.parametrize("moments", ["float32", "float8"])
def test_scales_of_past_steps_are_those_of_weights_that_are_cast(moments: MomentDtype, bucket_size: int) -> None:
    """They are known before the update: weights are cast as soon as their masters have changed, and only once."""
    kept: dict[bool | None, list[tuple[Tensor, Tensor]]] = {None: [], False: []}
    for primary, found in kept.items():
        parameters, engine, session = build(bucket_size, primary=primary, name="delayed")
        adam = Adam(parameters.values(), lr=0.1, exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
        optimizer = shard_optimizer(adam, engine)
        for number in range(4):
            engine.zero_grad()
            with session.step(number), engine.micro_batches(1):
                x = torch.randn(16, 16, generator=torch.Generator().manual_seed(number)).bfloat16()
                linear(linear(x, parameters["up"]), parameters["down"]).sum().backward()
                rows = [precision_of(parameters[name])._cast_weight(parameters[name])[0] for name in ("up", "down")]  # type: ignore[union-attr]
                found += [(quantized.data.view(torch.uint8).clone(), quantized.scale.clone()) for quantized in rows]
            engine.finish_grad_sync()
            optimizer.step()
            engine.publish()
        histories = [precision_of(parameters[name]).history.past for name in ("up", "down")]  # type: ignore[union-attr]
        found += [(past, past) for past in histories if past is not None]
    assert len(kept[None]) == 10
    for ours, theirs in zip(kept[None], kept[False], strict=True):
        assert all(map(torch.equal, ours, theirs))


def _casts() -> tuple[list[int], list[list[str]]]:
    """Elements that casts of each publication write, and what came before it, of three steps on two ranks."""
    order: list[list[str]] = []
    sizes: list[int] = []
    write = quantized_out.cast_flat

    def cast(out: Tensor, *args: Any, **more: Any) -> None:
        order[-1].append("cast")
        sizes[-1] += out.numel()
        write(out, *args, **more)

    quantized_out.cast_flat = cast  # type: ignore[assignment]
    try:
        order.append([])
        sizes.append(0)
        parameters, engine, session = build(bucket_size=1, primary=None, name="delayed", over=mesh())
        optimizer = shard_optimizer(Adam(parameters.values(), lr=0.1), engine)
        for number in range(3):
            engine.zero_grad()
            with session.step(number), engine.micro_batches(1):
                linear(linear(torch.ones(16, 16).bfloat16(), parameters["up"]), parameters["down"]).sum().backward()
            engine.finish_grad_sync()
            order.append([])
            sizes.append(0)
            optimizer.step()
            order[-1].append("publish")
            engine.publish()
        engine.sync_parameters()
    finally:
        quantized_out.cast_flat = write
    return sizes, order


def test_quantized_values_leave_under_the_update() -> None:
    for sizes, order in run(_casts, 2):
        assert sizes == [48 * 16] * 4  # half of two weights
        assert order[0].count("cast") == 2
        for step in order[1:]:
            assert step == ["cast", "cast", "publish"]


def test_masters_may_move() -> None:
    """As offloading does: another storage, perhaps with other values."""
    parameters, engine, _ = build()
    for shard in engine.shards:
        shard.master.data = 3 * shard.master.data
    engine.parameters.recast()
    check(parameters, engine)


def test_weights_are_widened_at_the_end() -> None:
    parameters, engine, _ = build()
    values = {name: value.clone() for name, value in masters(engine).items()}
    narrow = engine.memory()["parameters"]
    engine.close()
    assert engine.memory()["parameters"] > narrow
    for name, value in values.items():
        assert parameters[name].dtype == torch.bfloat16
        assert torch.equal(parameters[name].detach(), value.bfloat16())
    with torch.no_grad():
        parameters["up"].fill_(2.0)
    engine.refresh_masters()  # they are parameters as others are now
    assert bool((masters(engine)["up"] == 2).all())
    engine.publish()
    assert bool((parameters["up"] == 2).all())


def test_loaded_masters_stay() -> None:
    """Where parameters are quantized, weights are loaded into the masters; those are not taken from the parameters."""
    parameters, engine, _ = build()
    for bucket in engine.buckets:
        bucket.shard.master.data.fill_(1 / 3)
        if not bucket.is_quantized:
            bucket.params.fill_(0.5)
    engine.refresh_masters()
    assert torch.equal(masters(engine)["down"], torch.full((16, 48), 1 / 3))
    assert bool((masters(engine)["norm"] == 0.5).all())
    check(parameters, engine)


class Layer(nn.Module):
    """Two weights stored quantized, which the backward pass needs again after other layers have used their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(48, 16) / 4), nn.Parameter(torch.randn(16, 48) / 4)
        self.bias = nn.Parameter(torch.randn(48))

    def forward(self, x: Tensor) -> Tensor:
        return x + linear(torch.tanh(linear(x, self.up) + self.bias), self.down)


def _sharded(level: str, primary: bool, replicate: int) -> tuple[list[float], list[Tensor], int, int]:
    """Losses, weights at the end, and bytes of parameters while they are quantized and after."""
    torch.manual_seed(5)
    model = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(4))})
    session, units = Session(), units_of(model)
    for layer in model["layers"]:  # type: ignore[attr-defined]
        for parameter in (layer.up, layer.down):
            precision = LowPrecision(recipe("tensorwise"), session, emulate=True, primary=primary)
            state_of(parameter).precision = precision
    numbers = owned_alone(model, units)
    infos = [
        ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), 0, unit=numbers[id(p)])
        for name, p in model.named_parameters()
    ]
    engine = DataParallelEngine(infos, mesh(), DataParallelOptions(level=level, replicate=replicate), units=units)
    optimizer = shard_optimizer(Adam(model.parameters(), lr=0.05), engine)
    narrow, losses = engine.memory()["parameters"], []
    draws = torch.Generator().manual_seed(engine.mesh.global_rank)
    for number in range(3):
        engine.zero_grad()
        with session.step(number), engine.micro_batches(2):
            for _ in range(2):
                x = torch.randn(8, 16, generator=draws)
                for layer in model["layers"]:  # type: ignore[attr-defined]
                    x = layer(x)
                loss = x.square().mean()
                losses.append(float(loss.detach()))
                loss.backward()
        engine.finish_grad_sync()
        optimizer.step()
        engine.publish()
        if number == 1:  # as hooks between steps do
            engine.gather_parameters()
            engine.release_parameters()
    engine.close()
    engine.gather_parameters()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    weights = [p.detach().clone() for p in model.parameters()]
    engine.release_parameters()
    return losses, weights, narrow, engine.memory()["parameters"]


@pytest.mark.parametrize(("ranks", "replicate"), [pytest.param(2, 1, marks=pytest.mark.full), (4, 2)])
def test_sharded_weights_are_gathered_quantized(ranks: int, replicate: int) -> None:
    """Bit for bit what casts of gathered float32 weights give, and a quarter of the bytes but for biases."""
    found = run(_sharded, ranks, "optim_grads_params", True, replicate)
    expected = run(_sharded, ranks, "optim_grads_params", False, replicate)
    for (losses, weights, narrow, wide), (usual, theirs, held, _) in zip(found, expected, strict=True):
        assert losses == usual
        assert all(map(torch.equal, weights, theirs))
        assert narrow < 0.4 * held
        assert wide == held
