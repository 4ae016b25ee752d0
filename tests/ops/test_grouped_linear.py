from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalight.errors import BackendError
from megalight.ops.grouped_linear import PRODUCT, WGRAD, GroupedLinearSpec, grouped_bias, grouped_linear, grouped_scale
from megalight.ops.linear import WeightGradients, deferring
from tests.ops.checks import error
from tests.ops.moe_checks import GROUPS, check_grouped_product, check_grouped_weight_gradient, offsets_of
from tests.ops.test_linear import with_main_grad

BACKENDS = ["loop", "reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_equal_a_loop(backend: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    run = {b.name: b.fn for b, _ in PRODUCT.table(GroupedLinearSpec("cpu", dtype, dtype, True, True))}[backend]
    check_grouped_product(run, "cpu", dtype, sizes, 24, 40)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize(("dtype", "main_dtype"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_weight_gradients_equal_a_loop(
    backend: str, sizes: tuple[int, ...], dtype: torch.dtype, main_dtype: torch.dtype
) -> None:
    run = {b.name: b.fn for b, _ in WGRAD.table(GroupedLinearSpec("cpu", dtype, main_dtype, True, True))}[backend]
    check_grouped_weight_gradient(run, "cpu", dtype, main_dtype, sizes, 24, 40)


def layer(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(sum(sizes), 5, dtype=torch.float64, requires_grad=True)
    return x, torch.randn(len(sizes), 4, 5, dtype=torch.float64), offsets_of(sizes)


@pytest.mark.parametrize("input_first", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_gradients_go_to_autograd_or_to_the_main_gradient(known: bool, input_first: bool) -> None:
    sizes = (3, 0, 7)
    x, weight, offsets = layer(sizes)
    weight = weight.transpose(1, 2).contiguous() if input_first else weight
    plain, main = nn.Parameter(weight.clone()), with_main_grad(weight)
    main.main_grad.fill_(torch.nan)
    main.megalight.untouched = True  # type: ignore[attr-defined]
    factors = plain.unbind() if input_first else plain.mT.unbind()
    expected = torch.cat([rows @ w for rows, w in zip(x.split(list(sizes)), factors, strict=True)])
    seed = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, (x, plain), seed)
    given = sizes if known else None
    out = grouped_linear(x, plain, offsets, given, input_first=input_first)
    assert error(out, expected) < 1e-14
    for actual, exact in zip(torch.autograd.grad(out, (x, plain), seed), grads, strict=True):
        assert error(actual, exact) < 1e-14
    for _ in range(2):  # the first overwrites, the second adds
        grouped_linear(x, main, offsets, given, input_first=input_first).backward(seed)
    assert x.grad is not None
    assert error(x.grad / 2, grads[0]) < 1e-14
    assert error(main.main_grad / 2, grads[1]) < 1e-14
    assert (main.grad, main.ready) == (None, 2)
    with torch.no_grad():
        assert error(grouped_linear(x, main, offsets, given, input_first=input_first), expected) < 1e-14


def test_weight_gradients_wait_in_a_queue() -> None:
    x, weight, offsets = layer((2, 3))
    main, queue = with_main_grad(weight), WeightGradients()
    out = grouped_linear(x, main, offsets)
    with deferring(queue):
        out.sum().backward()
    assert (len(queue), main.ready) == (1, 0)
    queue.run()
    assert main.ready == 1
    assert error(main.main_grad, torch.stack([r.sum(0).expand(4, 5) for r in x.split([2, 3])])) < 1e-14


def test_frozen_weights_get_nothing() -> None:
    x, weight, offsets = layer((2, 3))
    main = with_main_grad(weight)
    main.requires_grad_(False)
    grouped_linear(x, main, offsets).sum().backward()
    assert main.ready == 0
    assert x.grad is not None


def test_autocast() -> None:
    x, weight, offsets = torch.randn(5, 8, requires_grad=True), with_main_grad(torch.randn(2, 4, 8)), offsets_of((2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_linear(x, weight, offsets)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert error(weight.main_grad[1], x[2:].double().sum(0).expand(4, 8)) < 1e-2


@pytest.mark.parametrize("weighted", [False, True])
def test_biases_of_experts(weighted: bool) -> None:
    sizes = [3, 0, 2]
    y, bias = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, dtype=torch.float64, requires_grad=True) if weighted else None
    out = grouped_bias(y, bias, offsets_of(sizes), weights)
    rows = bias.repeat_interleave(torch.tensor(sizes), 0)
    expected = y + (rows if weights is None else rows * weights[:, None])
    assert error(out, expected) < 1e-14
    wanted = [bias] if weights is None else [bias, weights]
    seed = torch.randn_like(y)
    for actual, exact in zip(
        torch.autograd.grad(out, wanted, seed), torch.autograd.grad(expected, wanted, seed), strict=True
    ):
        assert error(actual, exact) < 1e-14


@pytest.mark.parametrize("sizes", [None, (2, 1)])
def test_rows_after_the_last_group_reach_no_bias(sizes: tuple[int, ...] | None) -> None:
    """They hold anything, and so do their gradients."""
    y, bias = torch.ones(5, 4), torch.ones(2, 4, requires_grad=True)
    y[3:] = torch.nan
    out = grouped_bias(y, bias, offsets_of((2, 1)), sizes=sizes)
    seed = torch.ones(5, 4)
    seed[3:] = torch.nan
    (grad,) = torch.autograd.grad(out, bias, seed)
    assert torch.equal(grad, torch.tensor([[2.0], [1.0]]).expand(2, 4))


@pytest.mark.parametrize(("extra", "told"), [(0, True), (0, False), (2, True), (2, False)])
def test_factors_of_experts(extra: int, told: bool) -> None:
    """Rows after the last group hold anything, and so do their gradients: neither reaches a factor."""
    sizes = [3, 0, 2]
    y = torch.randn(5 + extra, 4, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    expected = y[:5] * factors.repeat_interleave(torch.tensor(sizes), 0)
    seed = torch.randn(5 + extra, 4, dtype=torch.float64)
    exact = torch.autograd.grad(expected, [y, factors], seed[:5])
    with torch.no_grad():
        y[5:] = torch.nan
    seed[5:] = torch.nan
    out = grouped_scale(y, factors, offsets_of(sizes), sizes if told else None)
    assert error(out[:5], expected) < 1e-14
    assert not out[5:].any()
    for actual, wanted in zip(torch.autograd.grad(out, [y, factors], seed), exact, strict=True):
        assert error(actual, wanted) < 1e-14


def test_no_rows_at_all() -> None:
    x, weight, offsets = layer((0, 0))
    main = with_main_grad(weight)
    grouped_linear(x, main, offsets).sum().backward()
    assert bool((main.main_grad == 0).all())
    assert grouped_bias(torch.zeros(0, 4), torch.ones(2, 4), offsets).shape == (0, 4)


def test_a_loop_on_the_device_needs_the_sizes_on_the_host() -> None:
    with pytest.raises(BackendError, match="needs the sizes of the groups on the host"):
        PRODUCT.select(GroupedLinearSpec("cuda", torch.bfloat16, torch.bfloat16, False, True), "loop")
