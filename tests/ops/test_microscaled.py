"""Scales in the order of the hardware, and what products of a scale per 16 or 32 elements hand to torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalight.errors import BackendError
from megalight.ops import scaled_mm as microscaled
from megalight.ops.quantize import Scheme, quantize
from megalight.ops.quantize.formats import unpack_e2m1
from megalight.ops.quantize.recipes import recipe
from megalight.ops.scaled_mm import SCALED_MM, ScaledMatmulSpec
from tests.ops.checks import error


def place(row: int, column: int, columns: int) -> int:
    """Where the hardware looks for the scale of a row and a block of columns."""
    across = -(-columns // 4)
    tile = row // 128 * across + column // 4
    return 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


@pytest.mark.parametrize("shape", [(128, 4), (5, 3), (300, 9)])
def test_tiles(shape: tuple[int, int]) -> None:
    scale = torch.randint(1, 255, shape, dtype=torch.uint8)
    flat = microscaled.tiled(scale.view(torch.float8_e8m0fnu)).view(torch.uint8)
    seen = set()
    for row in range(shape[0]):
        for column in range(shape[1]):
            seen.add(place(row, column, shape[1]))
            assert flat[place(row, column, shape[1])] == scale[row, column]
    assert all(flat[index] == 0 for index in range(len(flat)) if index not in seen)


def hardware(left: Tensor, right: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """A product that reads quantized values and scales as they are documented."""
    values = []
    for data, scale in ((left, scale_a), (right.t(), scale_b)):
        assert data.is_contiguous()
        assert data.shape[1] % 16 == 0
        four = data.dtype == torch.float4_e2m1fn_x2
        elements = unpack_e2m1(data).double() if four else data.double()
        rows, size = elements.shape
        block = 16 if four else 32
        blocks = -(-size // block)
        index = torch.tensor([[place(row, column, blocks) for column in range(blocks)] for row in range(rows)])
        found = scale.view(torch.uint8)[index]
        factor = found.view(torch.float8_e4m3fn).double() if four else torch.exp2(found.double() - 127)
        values.append(elements * factor.repeat_interleave(block, 1)[:, :size])
    return (values[0] @ values[1].T).to(out_dtype)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("size", [96, 160])
def test_products_hand_over_what_the_quantized_values_say(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schemes = recipe(name)
    size -= 16 if name == "nvfp4" else 0  # an odd number of blocks
    a, b = (
        quantize(torch.randn(rows, size) * torch.logspace(-2, 2, rows)[:, None], scheme)
        for rows, scheme in ((131, schemes.x), (48, schemes.weight))
    )
    monkeypatch.setattr(torch, "_scaled_mm", hardware)
    found = microscaled.microscaled_product(a, b, torch.float32, False)
    assert found.dtype == torch.float32
    assert error(found, a.dequantize() @ b.dequantize().T) < 4e-3


def test_older_gpus_are_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from megalight.ops import scaled_mm

    with pytest.raises(BackendError, match="torch_mxfp8: serves 8-bit tiles"):
        SCALED_MM.select(ScaledMatmulSpec("cpu", Scheme("e4m3"), Scheme("e4m3"), torch.bfloat16), "torch_mxfp8")
    monkeypatch.setattr(scaled_mm, "cuda_why_not", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for name in ("mxfp8", "nvfp4"):
        schemes = recipe(name)
        with pytest.raises(BackendError, match=f"torch_{name}: needs a GPU of compute capability 10.0"):
            SCALED_MM.select(ScaledMatmulSpec("cuda", schemes.x, schemes.weight, torch.bfloat16), f"torch_{name}")
