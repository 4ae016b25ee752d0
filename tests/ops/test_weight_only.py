"""Products of few tokens with weights that are stored in e4m3."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.imports import has
from megalight.nn.mlp import MLP
from megalight.ops.linear import linear, takes_gemv
from megalight.ops.quantized_weight import QuantizedWeight, store, stored_of

SHAPES = [(64, 2048, 2048), (33, 1024, 128), (48, 2176, 128), (40, 96, 32)]
"""Rows of a weight, its columns, and those that share a scale."""


def quantized(out: int, size: int, block: int, dtype: torch.dtype, device: str) -> tuple[nn.Parameter, Tensor]:
    """Return a weight that is stored in e4m3, and its values."""
    rows = torch.logspace(-2, 1, out)[:, None]  # scales that are mixed up would show
    weight = nn.Parameter((torch.randn(out, size) * rows).to(device, dtype), requires_grad=False)
    return weight, store(weight, "fp8", block).values().double()


def check(out: int, size: int, block: int, device: str, dtype: torch.dtype, tolerance: float) -> None:
    few = importlib.import_module("megalight.ops.linear.weight_only").weight_only_product
    gemv = importlib.import_module("megalight.ops.linear.gemv").gemv
    torch.manual_seed(0)
    weight, exact = quantized(out, size, block, dtype, device)
    bias = torch.randn(out, device=device).to(dtype)
    for count in (1, 2, 17):
        x = (torch.randn(count, size, device=device) / size**0.5).to(dtype)
        for added in (None, bias):
            wanted = F.linear(x.double(), exact, None if added is None else added.double())
            found = few(x, weight, added)
            assert found.dtype == dtype
            assert float((found.double() - wanted).norm() / wanted.norm()) < tolerance
    pair, wide = quantized(2 * out, size, block, dtype, device)
    x = (torch.randn(1, size, device=device) / size**0.5).to(dtype)
    gate, up = F.linear(x.double(), wide).chunk(2, -1)
    found, wanted = gemv(x, pair, None, gate="silu"), F.silu(gate) * up
    assert float((found.double() - wanted).norm() / wanted.norm()) < 2 * tolerance


@pytest.mark.skipif(not has("triton") or torch.cuda.is_available(), reason="needs triton's interpreter")
@pytest.mark.parametrize(("out", "size", "block"), SHAPES)
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_interpreted(out: int, size: int, block: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared
    check(out, size, block, "cpu", torch.float32, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("out", "size", "block"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(out: int, size: int, block: int, dtype: torch.dtype) -> None:
    check(out, size, block, "cuda", dtype, 4e-3)


@pytest.mark.gpu
def test_layers_read_stored_weights_for_few_tokens_and_decode_them_for_many() -> None:
    layer = MLP(256, 640).to("cuda", torch.bfloat16).requires_grad_(False)
    for each in (layer.gate_up, layer.down):
        nn.init.normal_(each.weight, std=0.05)
        store(each.weight, "fp8", each.in_features)
        assert takes_gemv(torch.randn(1, each.in_features, device="cuda").bfloat16(), each.weight)
    x = torch.randn(70, 256, device="cuda").bfloat16()
    with torch.no_grad():
        many, few = layer(x), layer(x[:5])
        one = layer.of_single(x[:1], torch.zeros(1, 256, device="cuda").bfloat16())
    assert one is not None
    for found, wanted in ((few, many[:5]), (one, many[:1])):
        assert float((found - wanted).double().norm() / wanted.double().norm()) < 8e-3


@pytest.mark.parametrize("block", [32, 8])
def test_scales_of_published_weights_give_their_codes_back_from_bfloat16(block: int) -> None:
    torch.manual_seed(0)
    codes = (torch.randn(16, 32) * 100).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[0, :4] = torch.tensor([1, 2, 0x7E, 0x81], dtype=torch.uint8)  # smallest and largest values
    scales = torch.rand(16, 32 // block) / 50
    values = (codes.float().view(16, -1, block) * scales[..., None]).view(16, 32)
    found = QuantizedWeight(values.bfloat16(), "fp8", block, scales=scales)
    assert torch.equal(found.data.view(16, 32).view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.values(torch.float32), values.bfloat16().float())


def test_a_weight_takes_a_byte_for_each_value() -> None:
    weight = nn.Parameter(torch.randn(6, 32, dtype=torch.float64), requires_grad=False)
    exact, x = weight.data.clone(), torch.randn(3, 32, dtype=torch.float64)
    codes = store(weight, "fp8", 32)
    assert stored_of(weight) is codes
    assert codes.nbytes == 6 * 32 + 6 * 4
    error = (codes.values() - exact).norm() / exact.norm()
    assert 0 < float(error) < 0.04
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight), F.linear(x, codes.values()), rtol=0, atol=1e-12)
