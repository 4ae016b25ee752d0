"""Grouped products of few rows, with weights in half precision and in e4m3."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
from torch import Tensor, nn

from megalight.imports import has
from megalight.ops.grouped_linear import few_rows, grouped_linear
from megalight.ops.quantized_weight import store

SIZES = [3, 0, 40, 1, 0]
"""Rows of each expert; the stack has room for more of them."""


def check(out: int, size: int, block: int, device: str, dtype: torch.dtype, tolerance: float) -> None:
    product = importlib.import_module("megalight.ops.grouped_linear.few_rows").few_rows_product
    torch.manual_seed(0)
    rows = torch.logspace(-2, 1, len(SIZES) * out).view(len(SIZES), out, 1)  # scales that are mixed up would show
    weight = nn.Parameter((torch.randn(len(SIZES), out, size) * rows).to(device, dtype), requires_grad=False)
    exact = store(weight, "fp8", block).values().double() if block else weight.double()
    offsets = torch.tensor(SIZES).cumsum(0).int().to(device)
    x = (torch.randn(sum(SIZES) + 6, size) / size**0.5).to(device, dtype)
    x[sum(SIZES) :] = torch.nan
    found = product(x, weight, offsets)
    assert found.dtype == dtype
    ends = [0, *offsets.tolist()]
    for own, start, end in zip(exact, ends, ends[1:], strict=False):
        wanted = x[start:end].double() @ own.T
        assert float((found[start:end].double() - wanted).norm()) <= tolerance * float(wanted.norm())


SHAPES = [(70, 160, 0), (64, 80, 80), (33, 256, 128), (40, 96, 32)]
"""Rows of a weight, its columns, and those that share a scale; 0: it is not quantized."""


@pytest.mark.skipif(not has("triton") or torch.cuda.is_available(), reason="needs triton's interpreter")
@pytest.mark.parametrize(("out", "size", "block"), SHAPES)
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_interpreted(out: int, size: int, block: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared
    check(out, size, block, "cpu", torch.float32, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("out", "size", "block"), [*SHAPES, (1536, 2048, 0), (1536, 2048, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(out: int, size: int, block: int, dtype: torch.dtype) -> None:
    check(out, size, block, "cuda", dtype, 4e-3)


@pytest.mark.gpu
def test_experts_read_stored_weights_for_few_rows_and_decode_them_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 192, 256, device="cuda").bfloat16(), requires_grad=False)
    store(weight, "fp8", 128)
    offsets = torch.arange(5, 45, 5, dtype=torch.int32, device="cuda")
    x = torch.randn(40, 256, device="cuda").bfloat16()

    def run() -> Tensor:
        with torch.no_grad():
            return grouped_linear(x, weight, offsets)

    few = run()
    monkeypatch.setattr(few_rows, "MEAN", 0)
    decoded = run()
    assert not torch.equal(few, decoded), "both are of one kernel"
    assert float((few - decoded).double().norm() / decoded.double().norm()) < 8e-3
