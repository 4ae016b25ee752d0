"""Weights quantized: values near the weight's, and products and gradients of the decoded weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megalight.errors import ConfigurationError
from megalight.ops.linear import linear
from megalight.ops.quantized_weight import LEVELS, QuantizedWeight, store, stored_of


@pytest.mark.parametrize(("form", "bits", "error"), [("int8", 8, 0.008), ("nf4", 4, 0.11)])
def test_quantized_values_are_near_the_weight_and_small(form: str, bits: int, error: float) -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    quantized = QuantizedWeight(weight, form, 64)
    assert quantized.nbytes == weight.numel() * bits // 8 + 96 * 2 * 2  # and a scale of two bytes for each block
    values = quantized.values()
    assert values.dtype == torch.bfloat16
    assert 0 < float((values - weight).float().norm() / weight.float().norm()) < error
    # by block: the largest magnitude is exact up to the rounding of the scale
    for found, exact in zip(values.view(-1, 64).float(), weight.view(-1, 64).float(), strict=True):
        assert abs(float(found.abs().max() - exact.abs().max())) <= 2**-7 * float(exact.abs().max())


def test_each_element_gets_the_nearest_value() -> None:
    weight = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight[1] = 0
    tables = {"int8": torch.arange(-127, 128, dtype=torch.float64) / 127, "nf4": torch.tensor(LEVELS).double()}
    for form, table in tables.items():
        scale = weight.view(3, 2, 4).abs().amax(-1, keepdim=True)
        parts = weight.view(3, 2, 4) / scale.clamp_min(1e-300)
        nearest = table[(parts[..., None] - table).abs().argmin(-1)] * scale
        torch.testing.assert_close(QuantizedWeight(weight, form, 4).values(), nearest.view(3, 8), rtol=1e-7, atol=0)


def test_nf4_has_the_levels_of_modelopt() -> None:
    table = pytest.importorskip("modelopt.torch.quantization.qtensor.nf4_tensor").nf4_table
    # it holds four digits of them, in bfloat16
    torch.testing.assert_close(torch.tensor(LEVELS), table.float(), rtol=2**-8, atol=5e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nvfp4_has_the_values_of_modelopt(dtype: torch.dtype) -> None:
    modelopt = pytest.importorskip("modelopt.torch.quantization.qtensor")
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight[3, 16:32] = 0
    # ties of quantized values, below even and below odd ones
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    weight[0, :16] = torch.tensor([6.0, *middles, *(-middle for middle in middles), 0.0])
    packed, scale, second = modelopt.NVFP4QTensor.quantize(weight.clone(), 16)
    wanted = packed.dequantize(dtype=dtype, scale=scale, double_scale=second, block_sizes={-1: 16})
    quantized = QuantizedWeight(weight, "nvfp4", 16)
    assert torch.equal(quantized.scales.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(quantized.values(), wanted)
    # 4 bits, and 8 for each 16 features
    assert quantized.nbytes == weight.numel() // 2 + weight.numel() // 16 + 4
    assert not bool(QuantizedWeight(torch.zeros(2, 16), "nvfp4", 16).values().any())


@pytest.mark.parametrize(("form", "block"), [("int8", 4), ("nf4", 4), ("nvfp4", 16)])
def test_products_and_gradients_are_those_of_the_decoded_weight(form: str, block: int) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 32, dtype=torch.float64), requires_grad=False)
    plain, bias = QuantizedWeight(weight, form, block).values(), torch.randn(6, dtype=torch.float64)
    quantized = store(weight, form, block)
    assert stored_of(weight) is quantized
    assert weight.untyped_storage().nbytes() == 8
    assert bool(weight.isnan().all())
    x = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    y, expected = linear(x, weight, bias), F.linear(x, plain, bias)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (y, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight), F.linear(x, plain), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("form", "block", "rule"),
    [("int3", 4, "no format 'int3'"), ("int8", 3, "must be even"), ("nvfp4", 32, "one scale for 16")],
)
def test_refusals(form: str, block: int, rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rule):
        QuantizedWeight(torch.zeros(2, 8), form, block)
