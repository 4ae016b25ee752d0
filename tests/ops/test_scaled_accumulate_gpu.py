from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.ops.quantize import Scheme, cast
from megalight.ops.scaled_accumulate import SCALED_ACCUMULATE, scaled_accumulate
from megalight.ops.scaled_mm import Spec, scaled_mm
from tests.ops.checks import error

pytestmark = pytest.mark.gpu

BACKENDS = ["cublaslt", "triton", "product_add"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("shape", [(150, 144, 272), (6144, 4096, 8192), (16, 16, 17), (4096, 14336, 1000)])
def test_sums_equal_the_reference(backend: str, gradient: Any, write: bool, shape: tuple[int, int, int]) -> None:
    rows, columns, tokens = shape
    a, b = Scheme(gradient), Scheme("e4m3")
    reasons = {row.name: reason for row, reason in SCALED_ACCUMULATE.table(Spec("cuda", a, b, torch.float32))}
    if reasons[backend] is not None:
        pytest.skip(reasons[backend])
    _, left = cast(torch.randn(tokens, rows, device="cuda").bfloat16(), None, a)
    _, right = cast(torch.randn(tokens, columns, device="cuda").bfloat16() * 1e-3, None, b)
    assert left is not None
    assert right is not None
    out = torch.randn(rows, columns, device="cuda")
    expected = scaled_mm(left, right, torch.float64, backend="reference") + (0 if write else out.double())
    if write:
        out.fill_(torch.nan)
    scaled_accumulate(out, left, right, write=write, backend=backend)
    assert error(out, expected) < 2e-3


def test_an_h200_adds_in_the_products_own_epilogue() -> None:
    """The interface is called without a compiler's help, so a refusal shall be seen."""
    spec = Spec("cuda", Scheme("e5m2"), Scheme("e4m3"), torch.float32)
    reasons = {backend.name: reason for backend, reason in SCALED_ACCUMULATE.table(spec)}
    assert reasons["cublaslt"] is None, reasons


def test_products_can_be_captured() -> None:
    """Nothing waits for the device: a CUDA graph can hold it, and replays add again."""
    _, left = cast(torch.randn(64, 32, device="cuda").bfloat16(), None, Scheme("e4m3"))
    assert left is not None
    for backend in BACKENDS:
        spec = Spec("cuda", left.scheme, left.scheme, torch.float32)
        if {row.name: reason for row, reason in SCALED_ACCUMULATE.table(spec)}[backend] is not None:
            continue
        out = torch.zeros(32, 32, device="cuda")
        scaled_accumulate(out, left, left, backend=backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            scaled_accumulate(out, left, left, backend=backend)
        graph.replay()
        expected = scaled_mm(left, left, torch.float64, backend="reference")
        assert error(out, 2 * expected) < 2e-3
