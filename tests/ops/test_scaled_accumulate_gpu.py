from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.ops.quantize import Scheme, cast
from megalight.ops.scaled_accumulate import SCALED_ACCUMULATE, scaled_accumulate
from megalight.ops.scaled_mm import ScaledMatmulSpec, scaled_mm
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
    reasons = {
        row.name: reason for row, reason in SCALED_ACCUMULATE.table(ScaledMatmulSpec("cuda", a, b, torch.float32))
    }
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


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("tile", [(1, 0), (1, 128)], ids=str)
def test_products_in_bf16_are_added_without_a_copy(tile: tuple[int, int], write: bool) -> None:
    """Rows and blocks have products that are rounded to bf16. No bit changes, and no copy in float32 is made."""
    scheme = Scheme("e4m3", tile)
    reasons = {
        row.name: reason
        for row, reason in SCALED_ACCUMULATE.table(ScaledMatmulSpec("cuda", scheme, scheme, torch.float32))
    }
    if reasons["product_add"] is not None:
        pytest.skip(reasons["product_add"])
    rows, columns = 1024, 2048
    left, right = (cast(torch.randn(512, size, device="cuda").bfloat16(), None, scheme)[1] for size in (rows, columns))
    assert left is not None
    assert right is not None
    out = torch.randn(rows, columns, device="cuda")
    product = scaled_mm(left, right, torch.bfloat16)
    expected = product.float() if write else out + product
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scaled_accumulate(out, left, right, write=write)
    assert torch.equal(out, expected)
    assert torch.cuda.max_memory_allocated() - before < rows * columns * 3  # bytes


def test_an_h200_adds_in_the_products_own_epilogue() -> None:
    """The interface is called without a compiler's help, so a refusal shall be seen."""
    spec = ScaledMatmulSpec("cuda", Scheme("e5m2"), Scheme("e4m3"), torch.float32)
    reasons = {backend.name: reason for backend, reason in SCALED_ACCUMULATE.table(spec)}
    assert reasons["cublaslt"] is None, reasons


def test_products_can_be_captured() -> None:
    """Nothing waits for the device: a CUDA graph can hold it, and replays add again."""
    _, left = cast(torch.randn(64, 32, device="cuda").bfloat16(), None, Scheme("e4m3"))
    assert left is not None
    for backend in BACKENDS:
        spec = ScaledMatmulSpec("cuda", left.scheme, left.scheme, torch.float32)
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
