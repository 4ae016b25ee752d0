"""What is kept beside a parameter: whose it is, who hears of gradients, and what copies take along."""

from __future__ import annotations

import copy
import io

import torch
from torch import Tensor, nn

from megalight.ops.linear import linear
from megalight.ops.parameter import ParameterState, add_gradient, collect, known_state, release, state_of


def test_the_first_gradient_of_a_step_is_written() -> None:
    parameter, told = nn.Parameter(torch.ones(2)), []
    state = collect(parameter, torch.full((2,), torch.nan), lambda: told.append(1))
    assert parameter.main_grad is state.main_grad, "packages find it there"
    state.untouched = True
    for _ in range(2):
        add_gradient(parameter, torch.full((2,), 3.0))
    assert torch.equal(parameter.main_grad, torch.full((2,), 6.0))
    assert (len(told), state.untouched) == (2, False)


def test_a_kernel_of_a_package_asks_and_tells() -> None:
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, weight: nn.Parameter) -> Tensor:  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            ctx.weight = weight
            return x @ weight.T

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[None, None]:  # type: ignore[no-untyped-def]
            state = state_of(ctx.weight)
            torch.addmm(
                state.main_grad, grad.T, *ctx.saved_tensors, beta=0 if state.touch() else 1, out=state.main_grad
            )
            state.mark_grad_ready()
            return None, None

    weight, told = nn.Parameter(torch.randn(3, 4)), []
    collect(weight, torch.full((3, 4), torch.nan), lambda: told.append(1)).untouched = True
    x = torch.randn(5, 4)
    for _ in range(2):
        Fused.apply(x, weight).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(weight.main_grad, 2 * x.sum(0).expand(3, 4))
    assert len(told) == 2


def test_copies_and_pickles_begin_without_state() -> None:
    model = nn.Linear(3, 3)
    collect(model.weight, torch.zeros(3, 3), lambda: None)
    assert known_state(copy.deepcopy(model).weight) is None
    assert copy.deepcopy(state_of(model.weight)).main_grad is None
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)  # a pickle of our own
    state = known_state(loaded.weight)
    assert state is None or state.main_grad is None
    linear(torch.ones(1, 3), loaded.weight).sum().backward()
    assert loaded.weight.grad is not None


def test_one_place_collects_at_a_time_and_autograd_follows() -> None:
    parameter, told = nn.Parameter(torch.ones(1, 2)), []
    for name in "ab":
        collect(parameter, torch.zeros(1, 2), lambda name=name: told.append(name))
    linear(torch.ones(1, 2), parameter).sum().backward()
    assert told == ["b"]
    release(parameter)
    assert not hasattr(parameter, "main_grad")
    linear(torch.ones(1, 2), parameter).sum().backward()
    assert torch.equal(parameter.grad, torch.ones(1, 2))
    assert told == ["b"]


def test_a_state_has_no_room_for_loose_attributes() -> None:
    assert not hasattr(ParameterState(), "__dict__")
