from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalight.errors import BackendError
from megalight.ops.linear import WGRAD, WeightGradientSpec, accumulate_weight_gradient, input_gradient, linear
from megalight.ops.parameter import collect
from megalight.registry import choose
from tests.ops.checks import check_weight_gradient, error


class Parameter(nn.Parameter):
    """A parameter with a main gradient that counts how often it was called ready."""

    main_grad: Tensor
    ready = 0


def with_main_grad(data: Tensor, dtype: torch.dtype | None = None) -> Parameter:
    parameter = Parameter(data)

    def count() -> None:
        parameter.ready += 1

    collect(parameter, torch.zeros_like(data, dtype=dtype), count)
    return parameter


@pytest.mark.parametrize("leading", [(63,), (3, 7)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_main_gradients_equal_ordinary_ones(leading: tuple[int, ...], has_bias: bool) -> None:
    x = torch.randn(*leading, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, dtype=torch.float64)
    bias = torch.randn(4, dtype=torch.float64) if has_bias else None
    plain = [nn.Parameter(weight.clone()), None if bias is None else nn.Parameter(bias.clone())]
    main = [with_main_grad(weight), None if bias is None else with_main_grad(bias)]
    gradient = torch.randn(*leading, 4, dtype=torch.float64)
    expected = linear(x, *plain)
    expected.backward(gradient)
    expected_x, x.grad = x.grad, None
    for _ in range(2):  # gradients of two micro-batches add up
        out = linear(x, *main)
        out.backward(gradient)
    assert error(out, expected) < 1e-14
    assert expected_x is not None
    assert error(x.grad / 2, expected_x) < 1e-14
    for ours, theirs in zip(main, plain, strict=True):
        if ours is not None:
            assert ours.grad is None
            assert error(ours.main_grad / 2, theirs.grad) < 1e-14
            assert ours.ready == 2


@pytest.mark.parametrize("seen", [False, True])
def test_autograd_visits_parameters_only_where_nothing_else_leads_to_the_backward(seen: bool) -> None:
    weight, bias = (with_main_grad(torch.randn(size, dtype=torch.float64)) for size in ((4, 5), (4,)))
    visits: list[Tensor] = []
    for parameter in (weight, bias):
        parameter.register_post_accumulate_grad_hook(visits.append)  # type: ignore[no-untyped-call]
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=not seen)
    linear(x, weight, bias).backward(torch.ones(3, 4, dtype=torch.float64))
    assert len(visits) == 2 * seen
    assert (weight.ready, bias.ready) == (1, 1)
    torch.testing.assert_close(weight.main_grad, x.detach().sum(0).expand(4, 5))
    torch.testing.assert_close(bias.main_grad, torch.full((4,), 3.0, dtype=torch.float64))


def test_a_parameter_without_a_main_gradient_gets_its_gradient_from_autograd() -> None:
    weight, bias = with_main_grad(torch.randn(4, 5)), nn.Parameter(torch.randn(4))
    linear(torch.randn(3, 5, requires_grad=True), weight, bias).backward(torch.ones(3, 4))
    torch.testing.assert_close(bias.grad, torch.full((4,), 3.0))
    assert (weight.ready, weight.grad) == (1, None)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_half_weights_accumulate_in_the_main_gradients_type(main_dtype: torch.dtype) -> None:
    x = torch.randn(63, 32).bfloat16().requires_grad_()
    weight, bias = (with_main_grad(t.bfloat16(), main_dtype) for t in (torch.randn(16, 32), torch.randn(16)))
    gradient = torch.randn(63, 16).bfloat16()
    linear(x, weight, bias).backward(gradient)
    tolerance = 1e-6 if main_dtype == torch.float32 else 8e-3
    assert error(weight.main_grad, gradient.double().T @ x.double()) < tolerance
    assert error(bias.main_grad, gradient.double().sum(0)) < tolerance
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_survives_recomputation() -> None:
    """Activation recomputation hands back saved tensors that are not the parameter itself."""
    weight = with_main_grad(torch.randn(4, 5, dtype=torch.float64))
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    checkpoint(lambda x: linear(x, weight).sin(), x, use_reentrant=False).sum().backward()
    expected = (x @ weight.T).cos().T @ x
    assert error(weight.main_grad, expected) < 1e-14
    assert weight.ready == 1


def test_frozen_weight_gets_nothing() -> None:
    weight = with_main_grad(torch.randn(4, 5))
    weight.requires_grad_(False)
    x = torch.randn(3, 5, requires_grad=True)
    linear(x, weight).sum().backward()
    assert weight.ready == 0
    assert bool((weight.main_grad == 0).all())
    assert x.grad is not None


def test_autocast() -> None:
    weight, bias = with_main_grad(torch.randn(4, 8)), with_main_grad(torch.randn(4))
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x, weight, bias)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert error(weight.main_grad, x.double().sum(0).expand(4, 8)) < 1e-2


def test_pieces_for_overlap() -> None:
    grad_y, x = torch.randn(3, 7, 4, dtype=torch.float64), torch.randn(3, 7, 5, dtype=torch.float64)
    weight = torch.randn(4, 5, dtype=torch.float64)
    assert error(input_gradient(grad_y, weight), grad_y @ weight) < 1e-14
    plain = accumulate_weight_gradient(grad_y, x, weight)
    assert plain is not None
    main = with_main_grad(weight)
    assert accumulate_weight_gradient(grad_y, x, main) is None
    assert error(plain, grad_y.flatten(0, 1).T @ x.flatten(0, 1)) < 1e-14
    assert error(main.main_grad, plain) < 1e-14


@pytest.mark.parametrize(
    ("dtype", "main_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
def test_every_backend_that_serves_is_right(dtype: torch.dtype, main_dtype: torch.dtype) -> None:
    served: list[str] = []
    for backend, reason in WGRAD.table(WeightGradientSpec("cpu", dtype, main_dtype)):
        if reason is None:
            check_weight_gradient(backend.fn, "cpu", dtype, main_dtype, 63, 20, 30)
            served.append(backend.name)
    assert "reference" in served


def test_the_choice_keeps_float32_sums() -> None:
    def chosen(*spec: Any) -> str:
        return WGRAD.select(WeightGradientSpec(*spec)).name

    assert chosen("cpu", torch.float64, torch.float64) == "addmm"
    assert chosen("cpu", torch.bfloat16, torch.float32) == "reference"
    with pytest.raises(BackendError, match="needs tensors on cuda"):
        choose(WGRAD, WeightGradientSpec("cpu", torch.bfloat16, torch.float32), "addmm_fp32")
