"""Runs of tokens that see each other, in bf16 on a GPU: near a mask in float32, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalight.nn import InnerAttention
from megalight.types import PackedSequences
from tests.ops.checks import error
from tests.ops.test_attention_mutual import by_mask

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    ("lengths", "runs"),
    [([700, 300, 41], [(10, 256), (400, 256), (705, 90)]), ([512, 512], [(0, 256), (768, 256)])],
    ids=["ragged", "uniform"],
)
def test_near_a_mask(lengths: list[int], runs: list[tuple[int, int]], window: int | None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    rows = sum(lengths)
    # Heads of Gemma-3.
    drawn = [torch.randn(rows, heads, 256, generator=generator, device="cuda").bfloat16() for heads in (4, 2, 2)]
    factor = torch.randn(rows, 4, 256, generator=generator, device="cuda")
    inner = InnerAttention(scale=256**-0.5, window=window)
    inner.mutual = True
    sequences = replace(PackedSequences.of_lengths(lengths), runs=tuple(runs)).to("cuda")
    tensors = [tensor.clone().requires_grad_() for tensor in drawn]
    exact = [tensor.float().requires_grad_() for tensor in drawn]
    found = inner(*tensors, sequences)
    expected = by_mask(*exact, lengths, runs, rows if window is None else window, scale=256**-0.5)
    assert error(found, expected) < 1e-2
    gradients = [
        torch.autograd.grad((y.float() * factor).sum(), leaves) for y, leaves in ((found, tensors), (expected, exact))
    ]
    for one, other in zip(*gradients, strict=True):
        assert error(one, other) < 2e-2
