"""Attention in 8 bits, emulated on a GPU: the quantized values are those of a CPU."""

from __future__ import annotations

import pytest
import torch

from megalight.ops.fp8_attention import FP8Attention, FP8AttentionSpec
from megalight.types import PackedSequences
from tests.ops.checks import error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gpu_rounds_as_a_cpu(dtype: torch.dtype) -> None:
    data = [torch.randn(128, heads, 32, dtype=torch.float64).to(dtype) for heads in (4, 2, 2, 4)]
    found = []
    for device in ("cpu", "cuda"):
        *leaves, grad = (t.to(device).requires_grad_() for t in data)
        layer = FP8Attention("layer", FP8AttentionSpec(device, dtype, 32), "reference")
        out = layer(*leaves, PackedSequences.of_uniform(2, 64, device))
        found.append([t.cpu() for t in (out, *torch.autograd.grad(out, leaves, grad.detach()))])
    for ours, theirs in zip(*found, strict=True):
        # An exponential that differs in its last bit may fall on the other side of a tie.
        assert error(theirs, ours) < 1e-3
