"""Weights whose sides are no multiples of what 8-bit products take, with the products of a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.errors import BackendError
from megalight.ops.linear import linear
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import state_of
from megalight.ops.quantize import Scheme, quantize
from megalight.ops.quantize.recipes import recipe
from tests.ops.checks import error
from tests.ops.test_linear import with_main_grad

pytestmark = pytest.mark.gpu

TOKENS = 1031


def values(x: Tensor, scheme: Scheme) -> Tensor:
    """What a matrix with zeros at the ends of both sides is cast to, ``[R, K]``, in float64."""
    rows, columns = x.shape
    whole = F.pad(x.detach(), (0, -columns % scheme.multiple, 0, -rows % scheme.multiple))
    return quantize(whole, scheme).dequantize()[:rows, :columns]


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise", "blockwise"])
@pytest.mark.parametrize("shape", [(1280, 3420), (3420, 1280), (1284, 3418), (309, 515)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_and_gradients_are_those_of_the_casts(name: str, shape: tuple[int, int], has_bias: bool) -> None:
    rows, columns = shape
    schemes, session = recipe(name), Session()
    x = torch.randn(TOKENS, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad_y = torch.randn(TOKENS, rows, device="cuda", dtype=torch.bfloat16)
    weight = with_main_grad(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16), torch.float32)
    bias = with_main_grad(torch.randn(rows, device="cuda", dtype=torch.bfloat16), torch.float32) if has_bias else None
    try:
        LowPrecision.check_products(weight, schemes)
    except BackendError as reason:
        pytest.skip(str(reason))
    state_of(weight).precision = LowPrecision(schemes, session)
    # Twice, for the sum of two micro-batches.
    with session.step(0):
        for _ in range(2):
            y = linear(x, weight, bias)
            y.backward(grad_y)
    assert y.stride(1) == 1
    expected = values(x, schemes.x) @ values(weight, schemes.weight).T
    assert error(y, expected if bias is None else expected + bias.detach().double()) < 1e-2
    assert x.grad is not None
    wanted = values(grad_y, schemes.gradient) @ values(weight.detach().T, schemes.weight_t).T
    assert error(x.grad / 2, wanted) < 5e-3
    wanted = values(grad_y.T, schemes.gradient_t) @ values(x.detach().T, schemes.x_t).T
    assert error(weight.main_grad / 2, wanted) < 5e-3
    if bias is not None:
        assert error(bias.main_grad / 2, grad_y.double().sum(0)) < 1e-5
