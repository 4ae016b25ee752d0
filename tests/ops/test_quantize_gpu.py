from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.ops import cast_flat
from megalight.ops.linear import linear
from megalight.ops.linear.low_precision import LowPrecision, Session
from megalight.ops.parameter import state_of
from megalight.ops.quantize import Scheme, cast, quantize, transpose
from megalight.ops.quantize.amax_history import record_largest
from megalight.ops.quantize.recipes import recipe
from megalight.ops.scaled_mm import SCALED_MM, ScaledMatmulSpec, scaled_mm
from tests.ops.checks import Kernels, check_cast, check_cast_flat, check_told, error
from tests.ops.test_linear import with_main_grad

pytestmark = pytest.mark.gpu

TILES = [(0, 0), (1, 0), (1, 128), (128, 128)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("scale", ["fp32", "power"])
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(150, 144), (4096, 1024), (8192, 14336), (37, 122), (4097, 3420)])
def test_kernels_cast_as_the_reference(
    tile: tuple[int, int], scale: Any, form: Any, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    from megalight.ops.quantize import triton as kernels

    check_cast(kernels, "cuda", *shape, Scheme(form, tile, scale), dtype)


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_beyond_the_scale_saturate(form: Any, dtype: torch.dtype) -> None:
    x, given, scheme = torch.randn(150, 144, device="cuda").to(dtype), torch.tensor(0.5, device="cuda"), Scheme(form)
    found, expected = (
        cast(x, scheme, scheme, amax=given, amax_t=given, backend=backend) for backend in ("triton", "reference")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        assert bool(ours.data.float().isfinite().all())
        assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))


def test_not_a_number_stays() -> None:
    x = torch.randn(64, 64, device="cuda").bfloat16()
    x[3, 5] = torch.nan
    for tile in TILES:
        rows, columns = cast(x, Scheme("e4m3", tile), Scheme("e4m3", tile), backend="triton")
        assert rows is not None
        assert columns is not None
        assert bool(rows.data.float()[3, 5].isnan()) or bool(rows.scale.isnan().any())
        assert bool(columns.data.float()[5, 3].isnan()) or bool(columns.scale.isnan().any())


@pytest.mark.parametrize("backend", ["torch_tensorwise", "torch_rowwise", "torch_blockwise"])
@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(150, 144, 272), (4096, 1024, 2048), (17, 16, 16)])
def test_products_equal_the_reference(backend: str, gradient: Any, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    tiles = {"torch_tensorwise": ((0, 0), (0, 0)), "torch_rowwise": ((1, 0), (1, 0))}.get(
        backend, ((1, 128), (128, 128))
    )
    a, b = Scheme(gradient, tiles[0]), Scheme("e4m3", tiles[1])
    reasons = {row.name: reason for row, reason in SCALED_MM.table(ScaledMatmulSpec("cuda", a, b, torch.bfloat16))}
    if reasons[backend] is not None:
        pytest.skip(reasons[backend])
    left, _ = cast(torch.randn(m, k, device="cuda").bfloat16(), a, None)
    right, _ = cast(torch.randn(n, k, device="cuda").bfloat16(), b, None)
    assert left is not None
    assert right is not None
    expected = scaled_mm(left, right, torch.float64, backend="reference")
    assert error(scaled_mm(left, right, torch.bfloat16, backend=backend), expected) < 4e-3
    # Half as large as the product, so that it cannot be missed.
    bias = (torch.randn(n, device="cuda") * expected.std() / 2).bfloat16()
    found = scaled_mm(left, right, torch.bfloat16, bias=bias, backend=backend)
    assert error(found, expected + bias.double()) < 4e-3


@pytest.mark.parametrize("tile", [(1, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("shape", [(150, 144, 272), (17, 16, 16), (1, 128, 128), (1031, 640, 1296), (512, 1024, 4096)])
def test_products_of_blocks_equal_float64(tile: tuple[int, int], shape: tuple[int, int, int]) -> None:
    """Rows of very different magnitude, so that a scale in the wrong place cannot pass."""
    m, n, k = shape
    a, b = Scheme("e4m3", (1, 128)), Scheme("e4m3", tile)
    reasons = {row.name: reason for row, reason in SCALED_MM.table(ScaledMatmulSpec("cuda", a, b, torch.bfloat16))}
    if reasons["torch_blockwise"] is not None:
        pytest.skip(reasons["torch_blockwise"])
    left, right = (
        quantize(
            torch.randn(rows, k, device="cuda")
            * torch.logspace(-2, 2, rows, device="cuda")[:, None]
            * torch.logspace(-2, 2, k, device="cuda"),
            scheme,
        )
        for rows, scheme in ((m, a), (n, b))
    )
    expected = left.dequantize() @ right.dequantize().T
    found = scaled_mm(left, right, torch.bfloat16, backend="torch_blockwise")
    assert found.shape == expected.shape
    assert bool(((found.double() - expected).norm(dim=1) <= 4e-3 * expected.norm(dim=1)).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
def test_biases_are_served_wherever_products_are(name: str, dtype: torch.dtype) -> None:
    schemes = recipe(name)
    served = [
        SCALED_MM.select(ScaledMatmulSpec("cuda", schemes.x, schemes.weight, dtype, bias)).name != "reference"
        for bias in (False, True)
    ]
    assert served[0] == served[1]


def test_an_h200_has_tensorwise_and_rowwise_products() -> None:
    for name in ("tensorwise", "rowwise"):
        schemes = recipe(name)
        for a, b in ((schemes.x, schemes.weight), (schemes.gradient_t, schemes.x_t)):
            assert SCALED_MM.select(ScaledMatmulSpec("cuda", a, b, torch.bfloat16)).name == f"torch_{name}"


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_linear_equals_its_emulation(name: str) -> None:
    schemes = recipe(name)
    if SCALED_MM.select(ScaledMatmulSpec("cuda", schemes.x, schemes.weight, torch.bfloat16)).name == "reference":
        pytest.skip("no such products here")
    data = torch.randn(256, 384, device="cuda").bfloat16()
    x, grad_y = (torch.randn(200, size, device="cuda").bfloat16() for size in (384, 256))
    offset = torch.randn(256, device="cuda").bfloat16()
    found = []
    for emulate in (False, True):
        weight, session = with_main_grad(data.clone(), torch.float32), Session()
        bias = with_main_grad(offset.clone(), torch.float32)
        state_of(weight).precision = LowPrecision(schemes, session, emulate=emulate)
        leaf = x.clone().requires_grad_()
        with session.step(0):
            out = linear(leaf, weight, bias)
            out.backward(grad_y)
        found.append((out, leaf.grad, weight.main_grad, bias.main_grad))
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs) < 4e-3


@pytest.mark.parametrize("shape", [(144, 150), (4096, 14336)])
def test_transposed_quantized_values(shape: tuple[int, int]) -> None:
    quantized, _ = cast(torch.randn(shape, device="cuda"), Scheme("e4m3"), None)
    assert quantized is not None
    found = transpose(quantized, backend="triton")
    assert torch.equal(found.data.view(torch.uint8), quantized.data.view(torch.uint8).t())
    assert found.scale is quantized.scale


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_microscaled_products(name: str) -> None:
    schemes = recipe(name)
    spec = ScaledMatmulSpec("cuda", schemes.x, schemes.weight, torch.bfloat16)
    chosen: Any = SCALED_MM.select(spec)
    if torch.cuda.get_device_capability() < (10, 0):
        assert chosen.name == "reference"
        return
    a, b = (
        quantize(torch.randn(size, 288, device="cuda"), scheme)
        for size, scheme in ((300, schemes.x), (144, schemes.weight))
    )
    assert chosen.name == f"torch_{name}", SCALED_MM.table(spec)
    assert error(chosen.fn(a, b, torch.bfloat16, False), a.dequantize() @ b.dequantize().T) < 4e-3


def test_casts_tell_magnitudes() -> None:
    from megalight.ops.quantize import triton as kernels

    check_told(kernels, "cuda", torch.bfloat16)


@pytest.mark.parametrize("numel", [16, 4096 * 33, 99999])
def test_flat_casts(numel: int) -> None:
    check_cast_flat(Kernels(cast_flat), "cuda", numel)


@pytest.mark.parametrize("count", [1, 5, 4096, 20000])
def test_largest_magnitudes_are_recorded(count: int) -> None:
    kept, magnitudes = torch.zeros(3, device="cuda"), torch.rand(count, device="cuda")
    for factor in (1.0, 0.5):
        record_largest(kept[1], factor * magnitudes)
        assert kept.tolist() == [0, magnitudes.max(), 0]
