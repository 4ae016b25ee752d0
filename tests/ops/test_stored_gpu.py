"""Weights quantized on a GPU: every backend decodes the same values."""

from __future__ import annotations

import pytest
import torch

from megalight.ops.quantized_weight import decode
from tests.ops.checks import check_decode

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", ["int8", "nf4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_are_those_of_the_reference(form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_decode(decode, "cuda", form, dtype)
