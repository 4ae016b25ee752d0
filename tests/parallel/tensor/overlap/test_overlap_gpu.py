"""Ways to overlap on GPUs: the plain way's numbers, also while ranks lag, and no call that waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.ops.parameter import collect
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shared_state import SharedState
from megalight.parallel.tensor.linear import ColumnLinear, RowLinear
from megalight.parallel.tensor.overlap import symmetric
from megalight.parallel.tensor.overlap.spec import TensorOptions
from tests.support.nccl import runs_of

pytestmark = pytest.mark.gpu

WIDTH, INNER = 512, 768
OPTIONS = [
    TensorOptions(overlap="pipelined", pieces=2),
    TensorOptions(overlap="pipelined", keep_gathered=True, max_ctas=4),
    TensorOptions(overlap="symmetric", pieces=2),
    TensorOptions(overlap="symmetric", pieces=1),
    TensorOptions(overlap="symmetric", pieces=4),
    TensorOptions(overlap="symmetric", keep_gathered=True),
]


def mlp(shared: SharedState, dtype: torch.dtype) -> nn.Sequential:
    """A column and a row layer of this rank, whose weight gradients go to float32."""
    tp, rank = shared.mesh.tp, shared.mesh.rank("tp")
    generator = torch.Generator("cuda").manual_seed(rank)

    def weight(*shape: int) -> nn.Parameter:
        values = torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32) / shape[1] ** 0.5
        parameter = nn.Parameter(values.to(dtype))
        collect(parameter, torch.zeros(shape, device="cuda"))
        return parameter

    up, down = weight(INNER // tp, WIDTH), weight(WIDTH, INNER // tp)
    return nn.Sequential(
        ColumnLinear(up, None, [len(up)], shared, name="up"), nn.GELU(), RowLinear(down, None, shared, name="down")
    )


def step(module: nn.Sequential, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(grad)
    found = {"output": y.detach(), "input": x.grad}
    for name, parameter in module.named_parameters():
        found[name] = parameter.main_grad.clone()
        parameter.main_grad.zero_()
    return found


def _compare(options: TensorOptions) -> None:
    symmetric.LEAST_BYTES = 0  # in a process of the test's own
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = ParallelMesh(size, rank, tp=size)
    plain = SharedState(mesh, True, tensor=TensorOptions(overlap="plain"))
    exact, module = mlp(plain, torch.float32), mlp(SharedState(mesh, True, tensor=options), torch.bfloat16)
    for mine, theirs in zip(module.parameters(), exact.parameters(), strict=True):
        theirs.data.copy_(mine.data)
    results = []
    for index, tokens in enumerate((128, 256, 256, 64, 256)):  # buffers grow, and are used again
        generator = torch.Generator("cuda").manual_seed(100 * index + rank)
        x, grad = (torch.randn(tokens, WIDTH, generator=generator, device="cuda").bfloat16() for _ in range(2))
        wanted = step(exact, x.float(), grad.float())
        torch.cuda.synchronize()
        last = index == 4
        if last:
            torch.cuda.set_sync_debug_mode("error")
        if rank == index % size:
            torch.cuda._sleep(20_000_000)  # this rank lags by about 10 ms
        found = step(module, x, grad)
        torch.cuda.set_sync_debug_mode("default")
        results.append((found, wanted))
    for found, wanted in results:
        for name, value in wanted.items():
            error = ((found[name].float() - value).norm() / value.norm()).item()
            assert error < 2e-2, f"{options}: {name} is off by {error:.2e}"


def _recorded(overlap: str) -> None:
    """Copies and flags that a CUDA graph replays."""
    symmetric.LEAST_BYTES = 0
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh, tokens = ParallelMesh(size, rank, tp=size), 256
    modules = [
        mlp(SharedState(mesh, True, tensor=TensorOptions(overlap=way)), torch.bfloat16) for way in ("plain", overlap)
    ]
    for mine, theirs in zip(modules[1].parameters(), modules[0].parameters(), strict=True):
        mine.data.copy_(theirs.data)
    x = torch.randn(tokens, WIDTH, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(tokens, WIDTH, device="cuda").bfloat16()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(modules[1](x), x, grad)
    torch.cuda.current_stream().wait_stream(side)
    dist.barrier()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        y = modules[1](x)
        (found,) = torch.autograd.grad(y, x, grad)
    for index in range(4):
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(10 * index + rank)))
        wanted = step(modules[0], x, grad)
        for parameter in modules[1].parameters():
            parameter.main_grad.zero_()
        if rank == index % size:
            torch.cuda._sleep(20_000_000)
        graph.replay()
        results = {"output": y.detach(), "input": found}
        results |= {name: parameter.main_grad for name, parameter in modules[1].named_parameters()}
        for name, value in wanted.items():
            error = ((results[name].float() - value.float()).norm() / value.float().norm()).item()
            assert error < 2e-2, f"{name} is off by {error:.2e} in replay {index}"


def _limited(limit: int) -> None:
    """The limit reaches NCCL."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shared = SharedState(
        ParallelMesh(size, rank, tp=size), True, tensor=TensorOptions(overlap="pipelined", max_ctas=limit)
    )
    options = shared.message_group._get_backend(torch.device("cuda", rank)).options
    assert options.config.max_ctas == limit
    assert options.is_high_priority_stream


def jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    compared = [(_compare, (options,)) for options in OPTIONS if world % (options.pieces or 1) == 0]
    return [*compared, (_limited, (3,)), (_recorded, ("symmetric",))]


def world_of(options: TensorOptions) -> int:
    return max(2, options.pieces or 2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_numbers_of_the_plain_way(options: TensorOptions) -> None:
    runs_of(jobs, world_of(options)).outcome((options,))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_graphs_record_copies_and_flags(world: int) -> None:
    runs_of(jobs, world).outcome(("symmetric",))


def test_a_group_of_few_sms() -> None:
    runs_of(jobs, 2).outcome((3,))
