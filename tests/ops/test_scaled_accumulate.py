"""Weight gradients in 8 bits that are added where they belong, against a float64 product and an addition."""

from __future__ import annotations

import pytest
import torch

from megalight.errors import BackendError
from megalight.ops.linear import linear
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import state_of
from megalight.ops.quantize import Scheme, quantize
from megalight.ops.quantize.recipes import recipe
from megalight.ops.scaled_accumulate import SCALED_ACCUMULATE, scaled_accumulate
from megalight.ops.scaled_mm import Spec
from tests.ops.test_linear import with_main_grad


@pytest.mark.parametrize("scheme", [Scheme("e4m3"), Scheme("e4m3", (1, 0)), Scheme("e4m3", (1, 32), "e8m0")])
def test_the_reference_adds(scheme: Scheme) -> None:
    a, b = (quantize(torch.randn(size, 64), scheme) for size in (17, 33))
    out = torch.randn(17, 33, dtype=torch.float64)
    product = a.dequantize() @ b.dequantize().T
    expected = out + product
    scaled_accumulate(out, a, b, backend="reference")
    assert torch.equal(out, expected)
    scaled_accumulate(out.fill_(torch.nan), a, b, write=True, backend="reference")
    assert torch.equal(out, product.double())


def test_others_say_why_not() -> None:
    one, tiles = Scheme("e4m3"), Scheme("e4m3", (1, 0))
    for spec, name, why in (
        (Spec("cpu", one, one, torch.float32), "cublaslt", "cuda"),
        (Spec("cpu", one, one, torch.float32), "triton", "triton|cuda"),
        (Spec("cpu", one, one, torch.float32), "product_add", "no fast product"),
        (Spec("cuda", tiles, one, torch.float32), "cublaslt", "one scale"),
        (Spec("cuda", one, one, torch.float64), "cublaslt", "float32"),
        (Spec("cuda", Scheme("e5m2"), Scheme("e5m2"), torch.float32), "triton", "e5m2 by e4m3"),
    ):
        with pytest.raises(BackendError, match=why):
            SCALED_ACCUMULATE.select(spec, name)


def test_only_the_first_gradient_is_written() -> None:
    """Where a step was begun; the second micro-batch adds."""
    weight, session = with_main_grad(torch.randn(32, 48)), Session()
    seen: list[bool] = []

    class Watched(LowPrecision):
        def accumulate(self, *args: object) -> None:
            seen.append(bool(args[-1]))
            super().accumulate(*args)  # type: ignore[arg-type]

    state_of(weight).precision = Watched(recipe("tensorwise"), session, emulate=True)
    found = []
    for begun in (False, True):
        if begun:
            weight.main_grad.fill_(torch.nan)
            state_of(weight).untouched = True
        for _ in range(2):
            linear(torch.ones(16, 48), weight).sum().backward()
        found.append(weight.main_grad.clone())
    assert seen == [False, False, True, False]
    assert torch.equal(*found)
