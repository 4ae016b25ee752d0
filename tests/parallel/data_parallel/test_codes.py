"""Weights that live as codes in the buffers of one process; whole runs, on several ranks, are tests of strategies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalight.ops.linear import linear
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import precision_of, state_of
from megalight.ops.quantize import Quantized, quantize
from megalight.ops.quantize.recipes import recipe
from megalight.optim import Adam, shard_optimizer
from megalight.parallel.data_parallel import DataParallelEngine, ParamInfo
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec

SHAPES = {"up": (48, 16), "down": (16, 48), "norm": (16,)}


def build(bucket_size: int = 1 << 20) -> tuple[dict[str, nn.Parameter], DataParallelEngine, Session]:
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for name, shape in SHAPES.items()
    }
    session = Session()
    for name in ("up", "down"):
        precision = LowPrecision(recipe("tensorwise"), session, emulate=True, primary=True)
        state_of(parameters[name]).precision = precision
    infos = [ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), 0) for name, p in parameters.items()]
    return parameters, DataParallelEngine(infos, ParallelMesh(), bucket_size=bucket_size), session


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
    """Codes and scales are those of the masters."""
    values = masters(engine)
    for name in ("up", "down"):
        expected, found = quantize(values[name], recipe("tensorwise").weight), held(parameters[name])
        assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(found.scale, expected.scale)


def test_scales_begin_where_cublas_reads_them() -> None:
    parameters, _, _ = build()
    assert [held(parameters[name]).scale.data_ptr() % 16 for name in ("up", "down")] == [0, 0]


@pytest.mark.parametrize("bucket_size", [1, 1 << 20])
def test_codes_follow_the_masters(bucket_size: int) -> None:
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


def test_masters_may_move() -> None:
    """As offloading does: another storage, perhaps with other values."""
    parameters, engine, _ = build()
    for shard in engine.shards:
        shard.master.data = 3 * shard.master.data
    engine.recast()
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
    """Where parameters are codes, weights are loaded into the masters; those are not taken from the codes."""
    parameters, engine, _ = build()
    for bucket in engine.buckets:
        bucket.shard.master.data.fill_(1 / 3)
        if not bucket.holds_codes:
            bucket.params.fill_(0.5)
    engine.refresh_masters()
    assert torch.equal(masters(engine)["down"], torch.full((16, 48), 1 / 3))
    assert bool((masters(engine)["norm"] == 0.5).all())
    check(parameters, engine)
