"""Momentum and decayed steps in one pass, against float64."""

from __future__ import annotations

import pytest
import torch

from megalight.imports import has
from megalight.ops import momentum


def check(device: str, n: int, nesterov: bool, scaled: bool) -> None:
    torch.manual_seed(0)
    gradient, buffer, param, update = (torch.randn(n, device=device) for _ in range(4))
    scale = torch.tensor(0.3, device=device) if scaled else None
    g = gradient.double() * (scale.double() if scale is not None else 1)
    moved = 0.9 * buffer.double() + 0.1 * g
    expected = 0.9 * moved + 0.1 * g if nesterov else moved
    out = torch.full((n,), torch.nan, dtype=torch.bfloat16, device=device)
    momentum.triton_momentum(out, gradient, buffer, 0.9, nesterov, scale)
    torch.testing.assert_close(buffer.double(), moved, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=8e-3, atol=1e-3)

    update = update.bfloat16()
    for lr in (0.1, torch.tensor(0.1, device=device)):
        expected = param.double() * (1 - 0.1 * 0.5) - 0.1 * update.double()
        copy = torch.full((n,), torch.nan, dtype=torch.bfloat16, device=device)
        momentum.triton_decayed(param, update, lr, 0.5, copy if scaled else None)
        torch.testing.assert_close(param.double(), expected, rtol=1e-5, atol=1e-6)
        if scaled:
            torch.testing.assert_close(copy, param.bfloat16(), rtol=8e-3, atol=0)  # the interpreter cuts bits off


def check_norms(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    factors = torch.tensor([0.0, 1e-4, 300.0], device=device)[: shape[0], None, None]
    x = (torch.randn(shape, device=device) * factors).to(dtype)
    wide = x.double()
    for eps in (1e-7, 5.0):
        exact = wide / torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True).clamp(min=eps)
        found = momentum.triton_normalized(x, eps)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=0)


@pytest.mark.gpu
def test_gradients_in_other_layouts() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(30, 20, device="cuda")
    found = []
    for each in (gradient, gradient.T.contiguous().T):
        buffer, out = torch.ones(30, 20, device="cuda"), torch.zeros(30, 20, device="cuda")
        momentum.momentum_step(out, each, buffer, momentum=0.9, nesterov=True)
        found.append((out, buffer))
    torch.testing.assert_close(found[0], found[1])


CASES = pytest.mark.parametrize(
    ("n", "nesterov", "scaled"), [(5, True, False), (2500, False, True), (1024, True, True)]
)


@pytest.mark.skipif(not has("triton") or torch.cuda.is_available(), reason="needs triton's interpreter")
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@CASES
def test_interpreted(n: int, nesterov: bool, scaled: bool) -> None:
    check("cpu", n, nesterov, scaled)


@pytest.mark.gpu
@CASES
def test_on_a_gpu(n: int, nesterov: bool, scaled: bool) -> None:
    check("cuda", n, nesterov, scaled)


@pytest.mark.skipif(not has("triton") or torch.cuda.is_available(), reason="needs triton's interpreter")
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("shape", [(3, 7, 5), (3, 64, 300)])
def test_norms_interpreted(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(momentum, "NORM_BLOCK", 256)
    monkeypatch.setattr(momentum, "MOST_PARTS", 32)
    check_norms("cpu", shape, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 7, 5), (3, 768, 2048), (2, 4096, 1030)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_norms("cuda", shape, dtype)
