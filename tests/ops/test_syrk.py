"""Symmetric rank-k updates against float64, and Newton-Schulz of them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.errors import BackendError
from megalight.imports import has
from megalight.ops.syrk import triton_syrk
from megalight.optim.muon import newton_schulz

SHAPES = [(1, 16, 16), (2, 48, 40), (2, 48, 32), (3, 33, 40), (2, 100, 52), (2, 80, 7), (2, 72, 64)]
SMALL: dict[str, Any] = {"ROWS": 16, "COLUMNS": 32, "DEPTH": 16, "GROUP": 2, "num_warps": 4, "num_stages": 3}
TALL = SMALL | {"ROWS": 32, "COLUMNS": 16}
SQUARE = SMALL | {"COLUMNS": 16}


def check(shape: tuple[int, int, int], device: str, dtype: torch.dtype, tile: dict[str, Any] | None) -> None:
    torch.manual_seed(0)
    wide = torch.randn(shape, device=device).to(dtype)
    c = torch.randn(shape[0], shape[1], shape[1], device=device)
    c = (c + c.mT).to(dtype)
    # The second lies in memory as the transpose of a tall matrix.
    terms = ((None, 1.0, 0.0, 0.0), (c, -0.5, 2.0, 3.0))
    for x, (added, alpha, beta, diagonal) in product((wide, wide.mT.contiguous().mT), terms):
        found = triton_syrk(x, added, alpha, beta, diagonal, tile)
        exact = alpha * (x.double() @ x.double().mT) + (0 if added is None else beta * added.double())
        exact.diagonal(dim1=1, dim2=2).add_(diagonal)
        assert found.dtype == dtype
        assert found.equal(found.mT)
        assert error(found, exact) < (1e-6 if dtype == torch.float32 else 4e-3)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.skipif(not has("triton") or torch.cuda.is_available(), reason="needs triton's interpreter")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", [SMALL, TALL, SQUARE], ids=["wide", "tall", "square"])
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_interpreted(shape: tuple[int, int, int], tile: dict[str, Any]) -> None:
    check(shape, "cpu", torch.float32, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (2, 1000, 2048), (3, 4096, 1024), (40, 768, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(shape, "cuda", dtype, None)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 1024, 4096), (1, 2048, 2048), (4, 768, 2048), (2, 4096, 1024), (1, 6144, 2048)])
def test_newton_schulz_on_a_gpu(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape, device="cuda")
    exact = newton_schulz(matrices, dtype=torch.float64)
    errors = [error(newton_schulz(matrices, backend=backend), exact) for backend in ("triton", "reference")]
    assert errors[0] < max(0.01, 1.1 * errors[1])


def test_a_backend_that_cannot_serve_says_why() -> None:
    with pytest.raises(BackendError, match=r"triton.*float64"):
        newton_schulz(torch.ones(1, 2, 2), dtype=torch.float64, backend="triton")
