from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.ops.parameter import collect
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shared_state import SharedState
from megalight.parallel.tensor import linear
from megalight.parallel.tensor.linear import ColumnLinear
from megalight.parallel.tensor.overlap import spec
from tests.support.workers import run


def layer(sequence_parallel: bool) -> tuple[ColumnLinear, Tensor, Tensor, Tensor]:
    """This rank's layer and input, the whole weight and the whole input."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shared = SharedState(ParallelMesh(size, rank, tp=size), sequence_parallel)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6 * size, 5, generator=generator, dtype=torch.float64)
    x = torch.randn(4 * size, 5, generator=generator, dtype=torch.float64)
    mine = weight.chunk(size)[rank].clone()
    bias = nn.Parameter(mine[:, 0].clone())
    own = x.chunk(size)[rank].clone() if sequence_parallel else x.clone()
    return ColumnLinear(nn.Parameter(mine), bias, [6], shared), own, weight, x


def main_gradients(sequence_parallel: bool) -> bool:
    """Weight gradients go straight to ``main_grad``, are added up, and are announced once per backward."""
    module, own, _, x = layer(sequence_parallel)
    told: list[str] = []
    for name, parameter in module.named_parameters():
        collect(parameter, torch.ones_like(parameter), partial(told.append, name))
    own.requires_grad_()
    y = module(own)
    y.backward(torch.ones_like(y))
    assert told == ["weight", "bias"]
    assert module.weight.grad is None
    assert module.bias.grad is None
    torch.testing.assert_close(module.weight.main_grad, 1 + x.sum(0).expand(6, 5))
    torch.testing.assert_close(module.bias.main_grad, torch.full((6,), 1.0 + x.shape[0], dtype=torch.float64))
    return True


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_go_to_main_grad(sequence_parallel: bool) -> None:
    assert all(run(main_gradients, 2, sequence_parallel))


def frozen(sequence_parallel: bool) -> bool:
    """What needs no gradient costs none: a frozen weight still passes the input's on, and the reverse."""
    module, own, weight, x = layer(sequence_parallel)
    module.requires_grad_(False)
    own.requires_grad_()
    module(own).sum().backward()
    torch.testing.assert_close(own.grad, weight.sum(0).expand(own.shape))
    assert module.weight.grad is None
    module.requires_grad_(True)
    module(own.detach()).sum().backward()
    torch.testing.assert_close(module.weight.grad, x.sum(0).expand(6, 5))
    return True


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_frozen_parts(sequence_parallel: bool) -> None:
    assert all(run(frozen, 2, sequence_parallel))


class Watched:
    """A collective under way that tells when it is waited for."""

    def __init__(self, name: str, pending: Any, events: list[str]) -> None:
        self.name, self.pending, self.events = name, pending, events

    def wait(self) -> Tensor:
        self.events.append(f"wait {self.name}")
        return self.pending.wait()


def order(sequence_parallel: bool) -> tuple[list[str], int]:
    """The order in which the backward starts and awaits things, and how many numbers the forward keeps."""
    module, own, _, _ = layer(sequence_parallel)
    events: list[str] = []
    before = {module: dict(vars(module)) for module in (linear, spec, spec)}

    def watch(module: Any, name: str, started: bool) -> None:
        def call(*args: Any) -> Any:
            events.append(name)
            result = before[module][name](*args)
            return Watched(name, result, events) if started else result

        setattr(module, name, call)

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.shape), t)[1], lambda t: t):
        y = module(own.requires_grad_())
    try:
        for name in ("start_all_gather", "start_all_reduce", "start_reduce_scatter"):
            watch(spec, name, True)
        watch(spec, "input_gradient", False)
        watch(linear, "accumulate_weight_gradient", False)
        y.sum().backward()
    finally:
        for module, names in before.items():
            vars(module).update(names)
    return events, sum(shape.numel() for shape in kept)


def test_collectives_run_under_the_gemms() -> None:
    for events, kept in run(order, 2, True):
        assert events == [
            "start_all_gather",
            "input_gradient",
            "start_reduce_scatter",
            "wait start_all_gather",
            "accumulate_weight_gradient",
            "wait start_reduce_scatter",
        ]
        assert kept == 4 * 5  # this rank's share of the input alone
    for events, kept in run(order, 2, False):
        assert events == [
            "input_gradient",
            "start_all_reduce",
            "accumulate_weight_gradient",
            "wait start_all_reduce",
        ]
        assert kept == 8 * 5


def several(names: tuple[str, ...]) -> tuple[list[float], int]:
    """Errors of two layers with one input against the layers one by one; and the sums over ranks in a backward."""
    first, _, _, x = layer(False)
    bare = ColumnLinear(nn.Parameter(first.weight.detach().flip(1)[:4] * 2), None, [4], first.shared)
    for name in names:
        (first if name == "first" else bare).requires_grad_(False)
    parameters = [p for p in (first.weight, first.bias, bare.weight) if p.requires_grad]
    count, sums, errors = 0, linear.start_all_reduce, []

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return sums(*args)

    grads = []
    for together in (False, True):
        own = x.clone().requires_grad_()
        linear.start_all_reduce = counted
        ys = linear.column_linears(own, [first, bare]) if together else [first(own), bare(own)]
        loss = ys[0].sum() + ys[1].square().sum()
        grads.append([loss, *ys, *torch.autograd.grad(loss, [own, *parameters])])
        linear.start_all_reduce = sums
    errors = [float((a - b).abs().max()) for a, b in zip(*grads, strict=True)]
    return errors, count


@pytest.mark.parametrize("frozen", [(), ("first",), ("first", "bare")])
def test_layers_with_one_input_sum_its_gradient_once(frozen: tuple[str, ...]) -> None:
    for errors, count in run(several, 2, frozen):
        assert max(errors) < 1e-12
        assert count == 1
