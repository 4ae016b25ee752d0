"""Attention in 8 bits on a GPU: beside float32, beside its emulation, and in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalight.ops.attention import attention
from megalight.ops.fp8_attention import EXAMPLE, FP8Attention, FP8AttentionSpec
from megalight.plugins.transformer_engine.attention import fp8_attention_why_not as why_not
from megalight.types import PackedSequences
from tests.ops.checks import error

pytestmark = pytest.mark.gpu
SEQUENCES = (2, 512)


def results(data: list[Tensor], kind: str, spec: FP8AttentionSpec) -> list[Tensor]:
    """Output and gradients of queries, keys and values."""
    leaves = [t.clone().requires_grad_() for t in data[:3]]
    sequences = PackedSequences.of_uniform(*SEQUENCES, device="cuda")
    if kind == "exact":
        leaves = [t.detach().float().requires_grad_() for t in leaves]
        out = attention(*leaves, sequences, causal=spec.causal, backend="reference")
    else:
        layer = FP8Attention("layer", spec, kind)
        # Scales of gradients of scores come from earlier calls.
        for _ in range(3):
            out = layer(*leaves, sequences)
            gradients = torch.autograd.grad(out, leaves, data[3])
        return [out, *gradients]
    return [out, *torch.autograd.grad(out, leaves, data[3].to(out.dtype))]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [64, 128])
def test_kernels_lose_what_the_emulation_loses(size: int, causal: bool) -> None:
    spec = EXAMPLE._replace(device="cuda", head_dim=size, causal=causal)
    if (reason := why_not(spec)) is not None:
        pytest.skip(reason)
    tokens = SEQUENCES[0] * SEQUENCES[1]
    data = [torch.randn(tokens, heads, size, device="cuda").bfloat16() for heads in (8, 2, 2, 8)]
    data[3] *= 1e-3
    exact, emulated, found = (results(data, kind, spec) for kind in ("exact", "reference", "transformer_engine"))
    for true, ours, theirs in zip(exact, emulated, found, strict=True):
        assert 5e-3 < error(ours, true) < 0.15
        assert error(theirs, true) < max(0.15, 2 * error(ours, true))
