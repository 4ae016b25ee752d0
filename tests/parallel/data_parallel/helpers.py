"""Small models under the engine, and what they must be equal to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.parallel.data_parallel import (
    DataParallelEngine,
    ParamInfo,
)
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardPiece, ShardSpec
from tests.parallel.data_parallel.stale import stale_gradients


def mesh(**degrees: int) -> ParallelMesh:
    return ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees)


def build(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Odd sizes on purpose: 5 -> 7 -> 3, with a norm."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def infos(model: nn.Module, group: Callable[[str], int] = lambda name: 0) -> list[ParamInfo]:
    return [
        ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), group(name))
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


def split_spec(name: str, shape: Sequence[int], **piece: object) -> ShardSpec:
    return ShardSpec((ShardPiece(name, tuple(shape), (0,) * len(shape), tuple(shape), **piece),), tuple(shape))  # type: ignore[arg-type]


def batches(step: int, world: int, micro: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Inputs ``[world, micro, 4, 5]`` of one global batch."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(world, micro, 4, 5, generator=generator, dtype=torch.float64).to(dtype)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def accumulate(engine: DataParallelEngine, model: nn.Module, inputs: Tensor) -> None:
    """All micro-batches ``[micro, 4, 5]`` of a step, and the reduction."""
    with stale_gradients():
        engine.zero_grad()
    with engine.micro_batches(len(inputs)):
        for x in inputs:
            loss(model, x).backward()
    engine.finish_grad_sync()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    error = (actual.double() - expected.double()).norm()
    assert error <= tolerance * expected.double().norm(), f"relative error {error / expected.double().norm():.3e}"


def assert_models_close(actual: nn.Module, expected: nn.Module, tolerance: float = 1e-9) -> None:
    for a, b in zip(actual.parameters(), expected.parameters(), strict=True):
        assert_close(a.detach(), b.detach(), tolerance)
