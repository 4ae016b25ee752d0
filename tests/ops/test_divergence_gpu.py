"""Divergence of two linear layers on a GPU: float64 as on the CPU, bf16 near it."""

from __future__ import annotations

import pytest
import torch

from megalight.ops.divergence import KINDS, Projection, linear_divergence

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_cpu(kind: str) -> None:
    torch.manual_seed(0)
    drawn = [torch.randn(*shape, dtype=torch.double) for shape in ((300, 64), (1001, 64), (300, 32), (1001, 32))]
    labels = torch.randint(0, 1001, (300,)).masked_fill(torch.rand(300) < 0.2, -100)

    def run(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        hidden, weight, theirs, layer = (tensor.to(device, dtype) / 4 for tensor in drawn)
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        found, losses = linear_divergence(
            Projection(*leaves), Projection(theirs, layer), labels.to(device), kind=kind, temperature=1.5, chunk=128
        )
        assert losses is not None
        return [found, losses, *torch.autograd.grad(found.sum() + losses.sum(), leaves)]

    wanted = run("cpu", torch.double)
    for dtype, bound in ((torch.double, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        for value, reference in zip(run("cuda", dtype), wanted, strict=True):
            assert (value.cpu().double() - reference).norm() <= bound * reference.norm()
