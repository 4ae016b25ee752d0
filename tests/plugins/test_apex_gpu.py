"""Apex itself, against the float64 references: relative norms of 8e-3 in bfloat16, 2e-5 in float32."""

from __future__ import annotations

import pytest
import torch

from megalight.ops import adam as adam_op
from megalight.ops import linear as wgrad
from megalight.ops import norm as norm_op
from megalight.plugins import apex
from tests.ops.checks import check_adam, check_norms, check_weight_gradient
from tests.plugins.real import MARKS, need, serve

pytestmark = MARKS
NOT_BUILT = "could not be imported"
"""Extensions are built one by one."""


@pytest.fixture(autouse=True)
def _apex() -> None:
    need("apex", "apex", apex.register)


@pytest.mark.parametrize("shape", [(64, 64), (500, 3, 128), (500, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    serve(apex.rms_why_not, norm_op.NormSpec("cuda", dtype, dtype, shape[-1]), NOT_BUILT)
    check_norms(apex, "cuda", dtype, shape)


@pytest.mark.parametrize(("tokens", "out", "width"), [(64, 64, 128), (500, 304, 1000), (8192, 512, 256)])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient(main_dtype: torch.dtype, tokens: int, out: int, width: int) -> None:
    serve(apex.weight_gradient_why_not, wgrad.WeightGradientSpec("cuda", torch.bfloat16, main_dtype), NOT_BUILT)
    check_weight_gradient(apex.accumulate, "cuda", torch.bfloat16, main_dtype, tokens, out, width)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_adam(decoupled: bool, tensors: bool, out_dtype: torch.dtype | None) -> None:
    serve(apex.adam_why_not, adam_op.EXAMPLE._replace(device="cuda", out_dtype=out_dtype), NOT_BUILT)
    check_adam(apex.adam_step, "cuda", 100_003, decoupled=decoupled, tensors=tensors, out_dtype=out_dtype)
