"""Weight gradients in 8 bits that are added where they belong, against a float64 product and an addition."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.errors import BackendError
from megalight.ops.grouped_scaled import columns_of_groups
from megalight.ops.linear import linear
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import state_of
from megalight.ops.quantize import Quantized, Scheme, quantize
from megalight.ops.quantize.recipes import recipe
from megalight.ops.scaled_accumulate import SCALED_ACCUMULATE, accumulate_groups, cublaslt, scaled_accumulate
from megalight.ops.scaled_mm import ScaledMatmulSpec
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
        (ScaledMatmulSpec("cpu", one, one, torch.float32), "cublaslt", "cuda"),
        (ScaledMatmulSpec("cpu", one, one, torch.float32), "triton", "triton|cuda"),
        (ScaledMatmulSpec("cpu", one, one, torch.float32), "product_add", "no fast product"),
        (ScaledMatmulSpec("cuda", tiles, one, torch.float32), "cublaslt", "one scale"),
        (ScaledMatmulSpec("cuda", one, one, torch.float64), "cublaslt", "float32"),
        (ScaledMatmulSpec("cuda", Scheme("e5m2"), Scheme("e5m2"), torch.float32), "triton", "e5m2 by e4m3"),
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


class Library:
    """Stands in for cuBLASLt: multiplies what lies at the addresses that it gets, on the CPU."""

    @staticmethod
    def plan(
        device: None, rows: int, columns: int, tokens: int, left: Any, right: Any, strides: tuple[int, ...], align: int
    ) -> Any:
        layouts = [(columns, tokens, strides[0], left), (rows, tokens, strides[1], right)]
        return cublaslt._GemmPlan({"align": align}, *layouts, (rows, columns, strides[2], torch.float32), None)  # type: ignore[arg-type]

    @staticmethod
    def cublasLtMatmulDescSetAttribute(product: dict[Any, Any], attribute: int, value: Any, size: int) -> int:
        assert size == ctypes.sizeof(ctypes.c_void_p)
        product[attribute] = value._obj.value
        return 0

    @staticmethod
    def cublasLtMatmul(*arguments: Any) -> int:
        _, product, one, a, a_layout, b, b_layout, addend, c, c_layout, d, d_layout, *_ = arguments
        assert (c, c_layout) == (d, d_layout)
        assert not (a | b | d) % product["align"]
        scales = [ctypes.c_float.from_address(product[place]).value for place in (17, 18)]
        left, right, out = (matrix_at(*place) for place in ((a, a_layout), (b, b_layout), (d, d_layout)))
        total = (right.double() @ left.double().T) * scales[0] * scales[1] * one._obj.value
        beta = addend._obj.value
        out.copy_(total + (beta * out.double() if beta else 0))
        return 0


def matrix_at(address: int, layout: tuple[int, int, int, torch.dtype]) -> Tensor:
    rows, columns, stride, dtype = layout
    size = ((rows - 1) * stride + columns) * dtype.itemsize
    memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)
    return memory.as_strided((rows, columns), (stride, 1))


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("sizes", [(5, 130, 0, 21), (0, 0, 0, 0)])
def test_cublaslt_finds_the_groups_by_their_addresses(
    sizes: tuple[int, ...], write: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_library", Library), ("_handle", lambda device: None), ("_plan", Library.plan)):
        monkeypatch.setattr(cublaslt, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setitem(
        SCALED_ACCUMULATE._backends, "cublaslt", SimpleNamespace(name="cublaslt", fn=cublaslt.accumulate, plugin=None,
                                                                 why_not=lambda spec: None, priority=30)
    )  # fmt: skip
    one, line = Scheme("e4m3"), Scheme("e4m3", (1, 0))
    offsets = torch.tensor(sizes).cumsum(0).int()
    casts = []
    for features in (24, 40):
        x = torch.randn(sum(sizes) + 3, features)
        # One scale for each group, as casts with one scale per matrix have it.
        amax = torch.rand(len(sizes), 1).add(0.5).expand(-1, features)
        casts.append(columns_of_groups(x, line, offsets, amax, "reference"))
    left, right = casts
    start = torch.randn(len(sizes), 24, 40)
    found = {}
    for backend in ("reference", "cublaslt"):
        out = torch.full_like(start, torch.nan) if write else start.clone()
        accumulate_groups(out, left, right, (one, one), sizes, write=write, backend=backend)
        found[backend] = out
    torch.testing.assert_close(found["cublaslt"], found["reference"])
    single = [Quantized(cast.data[:, :128], cast.scale[0, :1, None], one) for cast in casts]
    if sizes[0]:
        out, expected = start[0].clone(), start[0] + single[0].dequantize() @ single[1].dequantize().T
        scaled_accumulate(out, *single, backend="cublaslt")
        torch.testing.assert_close(out, expected.float())
