"""Autograd functions by a short way, and inputs that are kept as recipes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalight.ops.autograd import RecomputeRecipe, apply, attach_recipe, once_differentiable, recipe_of
from megalight.ops.linear import WeightGradients, deferring, linear
from tests.ops.test_linear import with_main_grad


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_gradient() -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    apply(Square, x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 6.0]


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    (grad,) = torch.autograd.grad(apply(Square, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_torch_func_gets_torchs_own_answer() -> None:
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: apply(Square, x).sum())(torch.ones(3))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own doing
def test_it_can_be_compiled() -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    torch.compile(lambda x: apply(Square, x) + 1, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 6.0]


class Read(list[str]):
    """Counts how often a recipe was read."""

    def __call__(self) -> None:
        self.append("read")


def made(x: Tensor, read: Read) -> Tensor:
    """``sin(x)`` with its recipe."""
    return attach_recipe(x.sin(), RecomputeRecipe(torch.sin, (x,), read))


def ingredient() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_() * 1


@pytest.mark.parametrize("has_main_grad", [True, False])
def test_the_ingredients_are_kept_instead_of_the_input(has_main_grad: bool) -> None:
    data, read, x = torch.randn(3, 4, dtype=torch.float64), Read(), ingredient()
    weight = with_main_grad(data) if has_main_grad else nn.Parameter(data)
    kept: list[Tensor] = []
    y = made(x, read)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        out = linear(y, weight)
    assert read == ["read"]
    assert [tensor is x for tensor in kept] == [True]
    out.sum().backward()
    gradient = weight.main_grad if has_main_grad else weight.grad
    assert torch.equal(gradient, torch.ones(5, 3, dtype=torch.float64).T @ x.sin())


def test_a_frozen_weight_keeps_nothing() -> None:
    read, kept = Read(), []
    y, weight = made(ingredient(), read), torch.randn(3, 4, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        linear(y, weight)
    assert (read, kept) == (["read"], [])


def test_an_ingredient_that_changed_is_noticed() -> None:
    x = ingredient()
    out = linear(made(x, Read()), nn.Parameter(torch.randn(3, 4, dtype=torch.float64)))
    x.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_other_tensors_have_no_recipe() -> None:
    y = made(ingredient(), Read())
    assert recipe_of(y) is not None
    assert recipe_of(y.view_as(y)) is None
    assert recipe_of({"hidden": y}) is None


def test_a_deferred_gradient_waits_with_the_input_itself() -> None:
    """Which may be much smaller than what it is made from."""
    weight, queue, x = with_main_grad(torch.randn(3, 4, dtype=torch.float64)), WeightGradients(), ingredient()
    calls: list[Tensor] = []

    def again(x: Tensor) -> Tensor:
        calls.append(x)
        return x.sin()

    with deferring(queue):
        linear(attach_recipe(x.sin(), RecomputeRecipe(again, (x,), Read())), weight).sum().backward()
    assert len(calls) == 1
    queue.run()
    assert len(calls) == 1
    assert torch.equal(weight.main_grad, torch.ones(5, 3, dtype=torch.float64).T @ x.sin())
