"""``make_graphed_callables`` in small, with the contract of TransformerEngine's: modules, samples and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megalight.parallel.data_parallel.grad_hooks import GradReadyCounter


def make_graphed_callables(
    modules: tuple[nn.Module, ...],
    sample_args: tuple[tuple[Tensor, ...], ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    _order: Sequence[int] | None = None,
    _num_layers_per_chunk: Sequence[int] | None = None,
) -> tuple[Any, ...]:
    """Checks what the real one asserts, runs every module as often, and returns what stands for its graphs."""
    assert _order is not None
    assert _num_layers_per_chunk is not None
    chunks = max(_order)
    batches = len(_order) // chunks // 2
    assert chunks * batches * 2 == len(_order)
    assert len(modules) == sum(_num_layers_per_chunk)
    assert len(sample_args) == len(modules) * batches
    assert allow_unused_input, "weights whose gradients go elsewhere"
    in_flight: dict[int, int] = {}
    for step in _order:
        in_flight[abs(step)] = in_flight.get(abs(step), 0) + (1 if step > 0 else -1)
        assert in_flight[abs(step)] >= 0, "a backward before its forward"
    assert not any(in_flight.values())
    made = []
    first = 0
    for layers in _num_layers_per_chunk:
        for batch in range(batches):
            for place in range(layers):
                module = modules[first + place]
                sample = sample_args[first * batches + batch * layers + place]
                assert all(isinstance(value, Tensor) for value in sample)
                assert not {**module._forward_hooks, **module._forward_pre_hooks, **module._backward_hooks}
                for _ in range(num_warmup_iters + 1):
                    _run(module, sample, None)
                made.append(_replay(module, sample))
        first += layers
    return tuple(made)


def _run(module: nn.Module, inputs: Sequence[Tensor], gradient: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_(value.requires_grad) for value in inputs]
        output = module(*leaves)
        wanted = [value for value in (*leaves, *module.parameters()) if value.requires_grad]
        before = [value.grad for value in wanted]
        for value in wanted:
            value.grad = None
        torch.autograd.backward(output, torch.zeros_like(output) if gradient is None else gradient)
        found = [value.grad for value in wanted]
        for value, kept in zip(wanted, before, strict=True):
            value.grad = kept
    return output.detach(), found


def _replay(module: nn.Module, sample: Sequence[Tensor]) -> Any:
    shapes = [value.shape for value in sample]

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.inputs = [v.detach().clone().requires_grad_(v.requires_grad) for v in inputs[: len(sample)]]
            ctx.state = torch.get_rng_state()
            with torch.enable_grad():  # as it was recorded
                return module(*ctx.inputs).detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            after = torch.get_rng_state()
            torch.set_rng_state(ctx.state)
            with mock.patch.object(GradReadyCounter, "count"):  # a replay runs no Python: nobody hears of gradients
                found = iter(_run(module, ctx.inputs, gradient)[1])
            torch.set_rng_state(after)
            wanted = (*ctx.inputs, *module.parameters())
            return tuple(next(found) if value.requires_grad else None for value in wanted)

    def forward(*inputs: Tensor) -> Tensor:
        assert [value.shape for value in inputs] == shapes
        out: Tensor = Graphed.apply(*inputs, *module.parameters())
        return out

    return forward
