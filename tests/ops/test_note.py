from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalight.ops.linear import WeightGradients, deferring, linear
from megalight.ops.note import RecomputeRecipe, attach_recipe, recipe_of
from tests.ops.test_linear import with_main_grad


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
