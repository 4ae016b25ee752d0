"""What the ops share: autograd functions by a short way, and backends that find magnitudes on theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.ops.common import apply, measuring, once_differentiable, select, serve_all
from megalight.registry import Backend, BackendRegistry


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


def test_a_name_asks_for_magnitudes_and_a_backend_that_can_finds_them() -> None:
    registry: BackendRegistry = BackendRegistry("negate")

    def finds(x: int, measure: bool = False) -> tuple[int, bool]:
        return -x, measure

    def cannot(x: int) -> tuple[int, None]:
        return -x, None

    finds.measures = True  # type: ignore[attr-defined]
    registry.register(Backend("finds", finds, 1, serve_all))
    registry.register(Backend("cannot", cannot, 0, serve_all))
    for name, expected in (("auto", False), ("auto+amax", True), ("finds+amax", True), ("cannot+amax", None)):
        assert select(registry, None, name)(3) == (-3, expected)
    assert [measuring("auto"), measuring("auto+amax"), measuring("auto+amax", wanted=False)] == [
        "auto+amax",
        "auto+amax",
        "auto",
    ]
