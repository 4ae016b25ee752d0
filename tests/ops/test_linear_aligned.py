"""Weights whose sides are no multiples of what fast kernels read: products of copies give the same results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalight.ops.linear import aligned, input_gradient, linear, product
from tests.ops.checks import error
from tests.ops.test_linear import with_main_grad

SHAPES = [(16, 20), (20, 16), (21, 13), (12, 4), (16, 8)]


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let it pay on a CPU, and return the shapes of weights in products."""
    monkeypatch.setattr(aligned, "pays", lambda operand, shape: True)
    seen, plain = list[tuple[int, ...]](), torch.nn.functional.linear

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(tuple(weight.shape))
        return plain(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", multiply)
    return seen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("leading", [(6,), (2, 3), ()])
def test_products_and_gradients_are_those_of_the_weight(
    shape: tuple[int, int], has_bias: bool, leading: tuple[int, ...], padded: list[tuple[int, ...]]
) -> None:
    rows, columns = shape
    x = torch.randn(*leading, columns, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape, dtype=torch.float64)
    bias = torch.randn(rows, dtype=torch.float64) if has_bias else None
    gradient = torch.randn(*leading, rows, dtype=torch.float64)
    expected = x.detach() @ weight.T + (0 if bias is None else bias)
    flat_y, flat_x = gradient.reshape(-1, rows), x.detach().reshape(-1, columns)
    wanted = [gradient @ weight, flat_y.T @ flat_x, flat_y.sum(0)]
    # Ordinary gradients, and main gradients of two micro-batches.
    for wrap, times in ((nn.Parameter, 1), (with_main_grad, 2)):
        parameters = [wrap(weight.clone()), None if bias is None else wrap(bias.clone())]
        x.grad = None
        for _ in range(times):
            y = linear(x, *parameters)
            assert y.is_contiguous()
            assert error(y, expected) < 1e-14
            y.backward(gradient)
        own = [p if p is None else p.grad if p.grad is not None else p.main_grad for p in parameters]
        for ours, theirs in zip([x.grad, *own], wanted, strict=True):
            assert ours is None or error(ours / times, theirs) < 1e-14
    assert set(padded) == {(rows + -rows % 8, columns + -columns % 8)}


def test_products_without_a_graph(padded: list[tuple[int, ...]]) -> None:
    x, weight = torch.randn(5, 20, dtype=torch.float64), torch.randn(12, 20, dtype=torch.float64)
    gradient = torch.randn(5, 12, dtype=torch.float64)
    with torch.no_grad():
        assert error(product(x, weight, None), x @ weight.T) < 1e-14
        found = input_gradient(gradient, weight)
    assert found.is_contiguous()
    assert error(found, gradient @ weight) < 1e-14
    assert padded == [(16, 24)]


@pytest.mark.usefixtures("padded")
def test_no_tokens_add_nothing() -> None:
    weight = with_main_grad(torch.randn(12, 20, dtype=torch.float64))
    weight.main_grad.fill_(1.0)
    x = torch.zeros(0, 20, dtype=torch.float64, requires_grad=True)
    linear(x, weight).sum().backward()
    assert (weight.main_grad == 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [4, 6, 12, 13, 16])
def test_rows_are_filled_with_zeros(dtype: torch.dtype, columns: int) -> None:
    store = torch.randn(3, 40).to(dtype)
    for x in (store[:, :columns].contiguous(), store[:, :columns], store[:, 1 : columns + 1].contiguous()[1:]):
        found = aligned.filled(x)
        assert found.shape == (len(x), columns + -columns % 8)
        assert torch.equal(found[:, :columns], x)
        assert not found[:, columns:].any()
        assert (found is x) == (columns % 8 == 0)
        back = aligned.cut(found, columns)
        assert back.is_contiguous() or back is x
        assert torch.equal(back, x)
        whole = aligned.filled(x, rows=True)
        assert whole.shape == (8, columns + -columns % 8)
        assert torch.equal(whole[: len(x), :columns], x)
        assert int((whole != 0).sum()) == int((x != 0).sum())


def test_products_of_a_cpu_and_small_ones_are_left_alone() -> None:
    weight = torch.randn(300, 300, dtype=torch.bfloat16)
    assert not aligned.pays(weight, weight.shape)
    if torch.cuda.is_available():
        assert aligned.pays(weight.cuda(), weight.shape)
        assert not aligned.pays(weight.cuda(), torch.Size((12, 300)))
        assert not aligned.pays(weight.cuda().float(), weight.shape)
