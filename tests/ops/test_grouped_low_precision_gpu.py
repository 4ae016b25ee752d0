"""Grouped products in 8 bits on a GPU: the device's products beside emulated ones, bit for bit the same casts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalight.ops.grouped_linear import grouped_linear
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import state_of
from megalight.ops.quantize.recipes import recipe
from tests.ops.checks import error
from tests.ops.test_linear import with_main_grad

pytestmark = pytest.mark.gpu

SIZES, IN, OUT = (640, 0, 37, 256), 512, 384


def products(name: str, emulate: bool, known: bool) -> list[Tensor]:
    session, total = Session(), sum(SIZES)
    draws = torch.Generator("cuda").manual_seed(3)
    values = [
        torch.randn(shape, generator=draws, device="cuda").bfloat16()
        for shape in ((len(SIZES), OUT, IN), (total, IN), (total, OUT))
    ]
    weight, x = with_main_grad(values[0], torch.float32), values[1].requires_grad_()
    weight.main_grad.fill_(torch.nan)
    state_of(weight).untouched = True
    state_of(weight).precisions = tuple(LowPrecision(recipe(name), session, emulate=emulate) for _ in SIZES)
    offsets = torch.tensor(SIZES).cumsum(0).int().cuda()
    with session.step(0):
        y = grouped_linear(x, weight, offsets, SIZES if known else None)
        y.backward(values[2])
    assert x.grad is not None
    return [y.detach(), x.grad, weight.main_grad]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise"])
def test_products_of_the_device_equal_emulated_ones(name: str, known: bool) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    for found, expected in zip(products(name, False, known), products(name, True, known), strict=True):
        assert error(found, expected) < 1e-2
