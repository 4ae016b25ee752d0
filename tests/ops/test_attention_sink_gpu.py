"""Sinks on kernels in half types beside the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalight.ops.attention import attention
from megalight.types import PackedSequences
from tests.ops.checks import TOLERANCE, error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("lengths", [[256, 256], [300, 17, 195]], ids=["dense", "packed"])
def test_equals_the_reference(window: int | None, lengths: list[int]) -> None:
    torch.manual_seed(0)
    shapes = ((512, 8, 64), (512, 2, 64), (512, 2, 64), (8,))
    tensors = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    sequences = PackedSequences.of_lengths(lengths, "cuda")
    found = attention(*tensors[:3], sequences, window=window, sink=tensors[3], backend="block")
    expected = attention(*exact[:3], sequences, window=window, sink=exact[3], backend="reference")
    assert error(found, expected) <= TOLERANCE[torch.bfloat16]
    factor = torch.randn_like(found)
    gradients = torch.autograd.grad((found * factor).sum(), tensors)
    wanted = torch.autograd.grad((expected * factor).sum(), exact)
    for name, one, other in zip(("q", "k", "v", "sink"), gradients, wanted, strict=True):
        assert error(one, other) <= 2 * TOLERANCE[torch.bfloat16], name


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("new", [[100, 40], [1, 1]], ids=["chunks", "single"])
def test_continued_sequences(window: int | None, new: list[int]) -> None:
    """As context parallelism by gathered keys has them, and generation."""
    torch.manual_seed(0)
    shapes = ((sum(new), 8, 64), (512, 2, 64), (512, 2, 64), (8,))
    tensors = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    sequences = replace(PackedSequences.of_lengths(new, "cuda"), keys=PackedSequences.of_lengths([300, 212], "cuda"))
    found = attention(*tensors[:3], sequences, window=window, sink=tensors[3], backend="block")
    expected = attention(*exact[:3], sequences, window=window, sink=exact[3], backend="reference")
    assert error(found, expected) <= TOLERANCE[torch.bfloat16]
    factor = torch.randn_like(found)
    gradients = torch.autograd.grad((found * factor).sum(), tensors)
    wanted = torch.autograd.grad((expected * factor).sum(), exact)
    for name, one, other in zip(("q", "k", "v", "sink"), gradients, wanted, strict=True):
        assert error(one, other) <= 2 * TOLERANCE[torch.bfloat16], name
