from __future__ import annotations

import pytest
import torch

from megalight.ops import cross_entropy
from tests.ops.checks import check_cross_entropy

pytestmark = pytest.mark.gpu

TRITON = cross_entropy.CROSS_ENTROPY.table(cross_entropy.EXAMPLE)[0][0].fn


@pytest.mark.parametrize("tokens", [63, 1000])
@pytest.mark.parametrize(("size", "padding"), [(1000, 24), (32000, 0), (50257, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bias", "softcap", "chunk"), [(False, None, None), (True, 5.0, 100)])
def test_triton_equals_the_reference(
    tokens: int, size: int, padding: int, dtype: torch.dtype, bias: bool, softcap: float | None, chunk: int | None
) -> None:
    check_cross_entropy(
        TRITON, "cuda", dtype, tokens, size, 64, padding=padding, bias=bias, softcap=softcap, chunk=chunk
    )


@pytest.mark.parametrize("rows", [0, 300, 700])
def test_logits_that_do_not_fit_are_made_twice(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for so many of 1000 rows."""
    monkeypatch.setattr(cross_entropy, "memory_of", lambda device: 2 * 1000 * rows)
    monkeypatch.setattr(cross_entropy, "SHARE", 1)
    check_cross_entropy(TRITON, "cuda", torch.bfloat16, 999, 1000, 64)


def test_no_float32_logits() -> None:
    """Peak memory of forward and backward stays below two copies of the logits in bfloat16."""
    tokens, size = 4096, 32000
    hidden = torch.randn(tokens, 256, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(size, 256, device="cuda") * 0.05).bfloat16().requires_grad_()
    labels = torch.randint(0, size, (tokens,), device="cuda")
    cross_entropy.linear_cross_entropy(hidden, weight, labels, backend="triton").sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cross_entropy.linear_cross_entropy(hidden, weight, labels, backend="triton").sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * tokens * size * 2
