"""Weights whose sides are no multiples of what 8-bit products take, beside products of what casts stand for."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.linear import linear, low_precision
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import release, state_of
from megalight.ops.quantize import Quantized, cast, quantize
from megalight.ops.quantize.amax_history import GRADIENT
from megalight.ops.quantize.recipes import RECIPES, recipe
from megalight.ops.scaled_mm import scaled_mm
from tests.ops.checks import error
from tests.ops.test_linear import Parameter, with_main_grad

SHAPES = [(52, 87), (64, 87), (52, 96), (7, 3), (150, 131)]
"""Rows and columns of weights: both sides, one of them, less than a multiple, more than a block."""
TOKENS = 37


def made(name: str, shape: tuple[int, int], session: Session, **options: Any) -> tuple[Parameter, Tensor, Tensor]:
    """A weight with its precision, an input and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = shape
    data, x, grad_y = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in (shape, (TOKENS, columns), (TOKENS, rows))
    )
    weight = with_main_grad(data)
    state_of(weight).precision = LowPrecision(recipe(name), session, emulate=True, **options)
    return weight, x.requires_grad_(), grad_y


def values(x: Tensor, scheme: Any, generator: torch.Generator | None = None) -> Tensor:
    """What a matrix with zeros at the ends of both sides is cast to."""
    whole = F.pad(x.detach(), (0, -x.shape[1] % scheme.multiple, 0, -x.shape[0] % scheme.multiple))
    return quantize(whole, scheme, generator=generator).dequantize()


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "nvfp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_and_gradients_are_those_of_the_casts(name: str, shape: tuple[int, int]) -> None:
    session, schemes = Session(), recipe(name)
    weight, x, grad_y = made(name, shape, session)
    rows, columns = shape
    bias = with_main_grad(torch.randn(rows, dtype=torch.float64))
    sizes = set[int]()
    plain = scaled_mm

    def watched(a: Quantized, b: Quantized, *more: Any, **options: Any) -> Tensor:
        sizes.update((a.shape[1], b.shape[0], b.shape[1]))
        return plain(a, b, *more, **options)

    # Twice, for the sum of two micro-batches.
    with mock.patch.object(low_precision, "scaled_mm", watched), session.step(0):
        for _ in range(2):
            y = linear(x, weight, bias)
            y.backward(grad_y)
    assert all(size % schemes.multiple == 0 for size in sizes)
    assert y.stride(1) == 1
    expected = (values(x, schemes.x) @ values(weight, schemes.weight).T)[:TOKENS, :rows] + bias.detach()
    assert error(y, expected) < 1e-14
    assert x.grad is not None
    wanted = values(grad_y, schemes.gradient) @ values(weight.detach().T, schemes.weight_t).T
    assert error(x.grad / 2, wanted[:TOKENS, :columns]) < 1e-14
    wanted = (values(grad_y.T, schemes.gradient_t) @ values(x.detach().T, schemes.x_t).T)[:rows, :columns]
    assert error(weight.main_grad / 2, wanted) < 1e-14
    assert error(bias.main_grad / 2, grad_y.sum(0)) < 1e-14
    # Casts of few values are coarse, but they are casts of these.
    for found, exact in ((y, x @ weight.T + bias), (x.grad / 2, grad_y @ weight), (weight.main_grad / 2, grad_y.T @ x)):
        assert 1e-3 < error(found, exact) < 0.08


def test_four_bits_are_near_exact_products() -> None:
    session = Session()
    weight, x, grad_y = made("nvfp4", (52, 87), session)
    with session.step(0):
        y = linear(x, weight)
        y.backward(grad_y)
    for found, exact in ((y, x @ weight.T), (x.grad, grad_y @ weight), (weight.main_grad, grad_y.T @ x)):
        assert 1e-3 < error(found, exact) < 0.25


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "blockwise"])
def test_without_main_gradients_autograd_gets_them(name: str) -> None:
    weight, x, grad_y = made(name, (52, 87), Session())
    linear(x, weight).backward(grad_y)
    expected = weight.main_grad.clone()
    release(weight)
    linear(x, weight).backward(grad_y)
    assert weight.grad is not None
    assert weight.grad.is_contiguous()
    assert torch.equal(weight.grad, expected)


def test_scales_of_past_steps_see_no_zeros() -> None:
    """The second step has scales of the first one; its casts are those of matrices without added zeros."""
    session = Session()
    weight, x, grad_y = made("delayed", (52, 87), session)
    schemes = recipe("delayed")
    for step in range(2):
        x.grad = None
        weight.main_grad.zero_()
        with session.step(step):
            y = linear(x, weight)
            y.backward(grad_y)
    past = [each.detach().abs().max().float() for each in (x, weight, grad_y)]
    quantized, held, gradient = (
        quantize(each.detach(), scheme, amax).dequantize()
        for each, scheme, amax in zip(
            (x, weight, grad_y), (schemes.x, schemes.weight, schemes.gradient), past, strict=True
        )
    )
    assert error(y, quantized @ held.T) < 1e-14
    assert error(x.grad, gradient @ held) < 1e-14
    assert error(weight.main_grad, gradient.T @ quantized) < 1e-14


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_weights_stored_quantized(name: str) -> None:
    session = Session()
    weight, x, grad_y = made(name, (52, 87), session, primary=True)
    other, _, _ = made(name, (52, 87), session)
    rows, _ = cast(other.detach(), recipe(name).weight, None)
    assert rows is not None
    precision, plain = state_of(weight).precision, state_of(other).precision
    assert precision is not None
    assert plain is not None
    precision.scale = rows.scale
    with session.step(0):
        expected = linear(x, other)
        expected.backward(grad_y)
        wanted, x.grad = x.grad, None
        weight.data = rows.data
        y = precision.product(x.detach(), weight, None)
        found = precision.input_gradient(grad_y, weight)
        for held, made_of in zip(precision._cast_weight(weight), plain._cast_weight(other), strict=True):
            assert torch.equal(held.dequantize(), made_of.dequantize())
    assert torch.equal(y, expected)
    # One of the two transposes is a view: on some CPUs products of the same numbers round otherwise then.
    assert error(found, wanted) < 1e-14


def test_shares_of_tokens_have_the_quantized_values_of_the_whole() -> None:
    session = Session()
    weight, x, grad_y = made("tensorwise", (52, 87), session)
    precision = state_of(weight).precision
    assert precision is not None
    with session.step(0):
        linear(x, weight).backward(grad_y)
        shares = precision.cast_share(grad_y, GRADIENT, lambda amax: None)
        whole = precision.whole_gradient(shares, (TOKENS, 52), grad_y)
        assert whole.shape == (TOKENS, 52)
        assert x.grad is not None
        assert torch.equal(precision.input_gradient(whole, weight), x.grad)
        assert torch.equal(precision.weight_gradient(whole, x, weight.main_grad), weight.main_grad)


def test_no_tokens() -> None:
    session = Session()
    weight, x, _ = made("tensorwise", (52, 87), session)
    weight.main_grad.fill_(1.0)
    none = x.detach()[:0].requires_grad_()
    with session.step(0):
        y = linear(none, weight)
        assert y.shape == (0, 52)
        y.sum().backward()
    assert none.grad is not None
    assert none.grad.shape == (0, 87)
    assert bool((weight.main_grad == 1).all())
