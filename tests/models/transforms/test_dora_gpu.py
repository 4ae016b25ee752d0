from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megalight.models.transforms import DoRA
from megalight.nn import Linear, Section
from megalight.nn.init import initialize
from tests.support.reference_gpt import relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_a_device_computes_what_float64_computes(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    whole = nn.ModuleDict({"qkv": Linear(64, [Section(n, 32, 4) for n in "qkv"])}).double()
    dora = DoRA(rank=4, targets=["q", "v"], alpha=8.0)
    dora.change(whole)
    initialize(whole, 1)
    nn.init.normal_(whole["qkv"].adapter["default"].B, std=0.1)
    whole.to(dtype).double()  # both begin with the same rounded values
    dora.with_values(SimpleNamespace(root=whole))  # type: ignore[arg-type]
    model = copy.deepcopy(whole).to("cuda", dtype)
    x = torch.randn(16, 64).to(dtype)
    expected, found = whole["qkv"](x.double()), model["qkv"](x.cuda())
    assert relative_error(found.double().cpu(), expected) < tolerance
    expected.square().sum().backward()
    found.square().sum().backward()
    for name, parameter in whole["qkv"].adapter["default"].named_parameters():
        gradient = model["qkv"].adapter["default"].get_parameter(name).grad
        assert gradient is not None
        assert parameter.grad is not None
        assert relative_error(gradient.double().cpu(), parameter.grad) < 2 * tolerance, name
