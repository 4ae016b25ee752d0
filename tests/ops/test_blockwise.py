"""Scales of blocks in the order of the hardware, and what their products hand to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megalight.ops import scaled_mm as blockwise
from megalight.ops.quantize import Quantized, Scheme, quantize
from megalight.ops.quantize.recipes import recipe
from megalight.ops.scaled_mm import SCALED_MM, ScaledMatmulSpec

ROW, SQUARE = (1, 128), (128, 128)


def refusal(data: Tensor, scale: Tensor, square: bool) -> str | None:
    """Why ``F.scaled_mm`` refuses the scales of quantized values ``[rows, K]``: its checks since torch 2.10, on a GPU.

    It takes the stride 1 for a dim of size 1, too.
    """
    rows, blocks = data.shape[0], -(-data.shape[1] // 128)
    if scale.dtype != torch.float32:
        return "dtype"
    columns, step = (-(-rows // 128), blocks + -blocks % 4) if square else (blocks, rows)
    if tuple(scale.shape) != ((step, columns) if square else (rows, columns)):
        return "shape"
    strides = scale.stride(0) == 1 and (scale.stride(1) == step or (columns == 1 and scale.stride(1) == 1))
    return None if strides else "stride"


def read(data: Tensor, scale: Tensor, square: bool) -> Tensor:
    """The values ``[rows, K]`` as cuBLASLt reads them: by the address of each scale, not by strides."""
    rows, size = data.shape
    blocks = -(-size // 128)
    row, column = torch.arange(rows)[:, None], torch.arange(size)[None, :]
    # Both steps are multiples of 16 bytes, whatever the tensor says.
    step = blocks + -blocks % 4 if square else rows + -rows % 4
    place = row // 128 * step + column // 128 if square else column // 128 * step + row
    memory = torch.as_strided(scale, (scale.untyped_storage().nbytes() // 4,), (1,), 0)
    assert scale.storage_offset() == 0
    return data.double() * memory.double()[place]


def hardware(
    left: Tensor, right: Tensor, scale_a: Tensor, by_a: Any, scale_b: Tensor, by_b: Any, *, output_dtype: torch.dtype
) -> Tensor:
    """A product that refuses what torch refuses, and reads scales as they are documented."""
    values = []
    for data, scale, by in ((left, scale_a, by_a), (right.t(), scale_b, by_b)):
        assert data.is_contiguous()
        assert data.shape[1] % 16 == 0
        square = by == F.ScalingType.BlockWise128x128
        assert (why := refusal(data, scale, square)) is None, why
        values.append(read(data, scale, square))
    assert right.shape[1] % 16 == 0
    return (values[0] @ values[1].T).to(output_dtype)


def factor(rows: int, size: int, tile: tuple[int, int]) -> Quantized:
    # Rows and columns of very different magnitude: a scale in the wrong place cannot pass.
    x = torch.randn(rows, size) * torch.logspace(-2, 2, rows)[:, None] * torch.logspace(-2, 2, size)
    return quantize(x, Scheme("e4m3", tile))


@pytest.mark.parametrize("tiles", [(ROW, SQUARE), (ROW, ROW), (SQUARE, ROW)], ids=str)
@pytest.mark.parametrize(
    "shape", [(272, 144, 384), (1, 16, 16), (17, 128, 128), (131, 272, 528), (128, 400, 1024), (300, 16, 656)], ids=str
)
def test_products_hand_over_what_the_quantized_values_say(
    tiles: tuple[tuple[int, int], tuple[int, int]], shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = shape
    a, b = factor(m, k, tiles[0]), factor(n, k, tiles[1])
    monkeypatch.setattr(F, "scaled_mm", hardware)
    found = blockwise.blockwise_product(a, b, torch.float32, False)
    expected = a.dequantize() @ b.dequantize().T
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert bool(((found.double() - expected).norm(dim=1) <= 4e-3 * expected.norm(dim=1)).all())


def test_scales_of_views_are_copied_to_the_start_of_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked matrices share one tensor of scales; transposed ones have other strides."""
    monkeypatch.setattr(F, "scaled_mm", hardware)
    a, b = factor(64, 512, ROW), factor(256, 512, SQUARE)
    whole = torch.cat([b.scale.new_ones(1, 4), b.scale])
    for scale in (whole[1:], b.scale.t().contiguous().t()):
        other = Quantized(b.data, scale, b.scheme)
        assert torch.equal(
            blockwise.blockwise_product(a, other, torch.bfloat16, False),
            blockwise.blockwise_product(a, b, torch.bfloat16, False),
        )


@pytest.mark.parametrize("tile", [ROW, SQUARE], ids=str)
def test_torch_takes_the_scales(tile: tuple[int, int]) -> None:
    """By torch's own account of the shapes that its GPU products take, which knows whole blocks only."""
    a, b = factor(64, 640, ROW), factor(384, 640, tile)
    parts = (a.data, b.data.t(), blockwise.scales(a), blockwise.scales(b))
    with FakeTensorMode():
        made = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in parts]
        recipes = blockwise.RECIPES[ROW], blockwise.RECIPES[tile]
        y = F.scaled_mm(made[0], made[1], made[2], recipes[0], made[3], recipes[1])
        assert y.shape == (64, 384)
        with pytest.raises(RuntimeError, match="blockwise scaling"):
            F.scaled_mm(made[0], made[1], made[2], recipes[0], made[3].t(), recipes[1])


def test_a_refusal_is_a_reason_and_others_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong product or an error of torch at the trial turns the backend down."""
    from megalight.ops import scaled_mm

    schemes = recipe("blockwise")
    spec = ScaledMatmulSpec("cuda", schemes.x, schemes.weight, torch.bfloat16)
    monkeypatch.setattr(scaled_mm, "cuda_why_not", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    plain = scaled_mm.trial
    monkeypatch.setattr(scaled_mm, "trial", lambda spec, device: plain(spec, "cpu"))
    for double, reason in ((hardware, None), (swapped, "wrong product"), (refusing, "refuses it here: too new")):
        scaled_mm._probe.cache_clear()
        monkeypatch.setattr(F, "scaled_mm", double)
        rows = {backend.name: why for backend, why in SCALED_MM.table(spec)}
        why = rows["torch_blockwise"]
        assert why is None if reason is None else why is not None and reason in why
    scaled_mm._probe.cache_clear()


def swapped(left: Tensor, right: Tensor, scale_a: Tensor, by_a: Any, scale_b: Tensor, by_b: Any, **options: Any) -> Any:
    """A library that takes the scales of another block."""
    return hardware(left, right, scale_a.flip(1).t().contiguous().t(), by_a, scale_b, by_b, **options)


def refusing(*args: Any, **options: Any) -> Any:
    raise ValueError("too new\nand more")
