"""Quantization to 8 and 4 bits with scales: of a matrix and of its transpose, in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import HALF, lazy, serve_all, triton_why_not
from megalight.ops.quantize.formats import (
    LARGEST,
    e8m0_value,
    pack_e2m1,
    power_below,
    spread,
    to_e2m1,
    to_e2m1_stochastic,
    to_e8m0,
    to_fp8,
)
from megalight.ops.quantize.formats import Cast as Cast
from megalight.ops.quantize.formats import Quantized as Quantized
from megalight.ops.quantize.formats import Scheme as Scheme
from megalight.registry import Backend, BackendRegistry, choose

SIZE = 16
SIGNS = (1, -1, 1, 1, -1, -1, 1, -1, 1, 1, -1, 1, -1, -1, -1, 1)
"""Drawn once: according to the paper, one choice for all layers and steps is as good as many."""


@lru_cache(maxsize=8)
def rotation(device: torch.device) -> Tensor:
    """Return the rotation ``[16, 16]``: orthogonal, float32.

    It is orthogonal, so ``(a H)(b H)^T = a b^T``. It spreads an outlier over sixteen elements, so that fewer of the
    others round to 0. See https://arxiv.org/abs/2509.25149, section 4.2.
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < SIZE:
        # Sylvester's construction.
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    # Signs on the rows: without them, sixteen equal values would all land in one element.
    signs = torch.tensor(SIGNS, dtype=torch.float32)[:, None]
    return torch.mul(signs, matrix / SIZE**0.5).to(device)


def rotate(x: Tensor) -> Tensor:
    """Rotate each group of sixteen neighbors along ``K``: ``[R, K]`` to float32 ``[R, K]``, ``K`` a multiple of 16."""
    return torch.matmul(x.float().reshape(len(x), -1, SIZE), rotation(x.device)).reshape(x.shape)


TINY = 1e-30
"""Lower limit of a largest magnitude, so that scales stay finite. Tiles of zeros stay zero."""


def amax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude, 0-dim float32, in one pass. It is NaN if any value is NaN."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    wide = torch.promote_types(x.dtype, torch.float32)
    # The infinity norm is one kernel, without a copy of |x|.
    amax: Tensor = torch.linalg.vector_norm(x, float("inf"), dtype=wide)
    return amax.float()


def tile_amax(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each tile of ``[R, K]``, float32. Tiles at the edges may be incomplete."""
    rows, columns = x.shape
    height, width = tile[0] or max(rows, 1), tile[1] or max(columns, 1)
    x = F.pad(x.abs(), (0, -columns % width, 0, -rows % height))
    return x.reshape(len(x) // height, height, x.shape[1] // width, width).amax((1, 3)).float()


def divide(number: float, x: Tensor) -> Tensor:
    """Return ``number / x``, rounded once. (For a Python number, torch multiplies by a rounded reciprocal instead.)"""
    return torch.full_like(x, number) / x


def multiplier(amax: Tensor, largest: float, power: bool) -> Tensor:
    """Return the factor that maps float32 values of magnitude up to ``amax`` to the range of a format."""
    factor = divide(largest, amax.clamp(min=TINY))
    return power_below(factor) if power else factor


def scales_of(amax: Tensor, scheme: Scheme) -> Tensor:
    """Return the scales (value = data * scale) for each ``amax``, as :func:`quantize` computes them."""
    return 1.0 / multiplier(amax, LARGEST[scheme.format], scheme.scale == "power")


def quantize(
    x: Tensor, scheme: Scheme, amax: Tensor | None = None, generator: torch.Generator | None = None
) -> Quantized:
    """Quantize ``[R, K]``.

    Args:
        x: the matrix.
        scheme: how to quantize it.
        amax: largest magnitude that the scales must cover, instead of that of the values: 0-dim for one scale per
            matrix, ``[R, 1]`` for one per row. Larger values saturate. Schemes with smaller tiles ignore it.
        generator: random generator for stochastic rounding.
    """
    x = rotate(x) if scheme.hadamard else x.float()
    if scheme.scale == "e8m0":
        return _microscale(x, scheme)
    if scheme.scale == "e4m3":
        return _nvfp4(x, scheme, generator)
    if amax is None:
        amax = tile_amax(x, scheme.tile)
    factor = multiplier(amax, LARGEST[scheme.format], scheme.scale == "power").reshape(amax.shape or (1, 1))
    # The factor is multiplied, not divided by: kernels do the same, so quantized values are equal bit by bit.
    data = to_fp8(x * spread(factor, scheme.tile, *x.shape), scheme.format)
    return Quantized(data, 1.0 / factor, scheme)


def _microscale(x: Tensor, scheme: Scheme) -> Quantized:
    """Microscaling: each scale is the smallest power of two with which nothing saturates."""
    scale = to_e8m0(tile_amax(x, scheme.tile) / LARGEST[scheme.format])
    # In float64: 2^-127 is subnormal in float32.
    scaled = (x.double() / spread(e8m0_value(scale), scheme.tile, *x.shape)).float()
    data = pack_e2m1(to_e2m1(scaled)) if scheme.format == "e2m1" else to_fp8(scaled, scheme.format)
    return Quantized(data, scale, scheme)


def _nvfp4(x: Tensor, scheme: Scheme, generator: torch.Generator | None) -> Quantized:
    """NVFP4: https://arxiv.org/abs/2509.25149, appendix C."""
    encode = divide(LARGEST["e4m3"] * LARGEST["e2m1"], amax_of(x).clamp(min=TINY))
    decode = 1.0 / encode
    # Two levels: e4m3 scales of 16 elements, in units of a float32 scale of the matrix, which maps the largest tile to
    # 448.
    scale = to_fp8(tile_amax(x, scheme.tile) / LARGEST["e2m1"] * encode, "e4m3")
    # Divide by the scale as stored (rounded), so that decoding gives back what was meant.
    step = scale.float() * decode
    factor = torch.where(step == 0, 0.0, 1.0 / step)  # a tile whose scale rounds to 0 becomes 0
    scaled = x * spread(factor, scheme.tile, *x.shape)
    if scheme.stochastic:
        uniform = torch.rand(x.shape, generator=generator, device=x.device)
        quantized = to_e2m1_stochastic(scaled, uniform)
    else:
        quantized = to_e2m1(scaled)
    return Quantized(pack_e2m1(quantized), scale, scheme, decode)


class QuantizeSpec(NamedTuple):
    """A request to a cast: device type, dtype of the input, schemes of the matrix and of its transpose."""

    device: str
    dtype: torch.dtype
    rows: Scheme | None
    columns: Scheme | None


CastFn: TypeAlias = Callable[
    [Tensor, Scheme | None, Scheme | None, Tensor | None, Tensor | None, torch.Generator | None, bool, int | None],
    Cast,
]
QUANTIZE: BackendRegistry[QuantizeSpec, CastFn] = BackendRegistry("quantize")
TRANSPOSE: BackendRegistry[QuantizeSpec, Callable[[Tensor], Tensor]] = BackendRegistry("transpose_quantized")
REGISTRIES: tuple[BackendRegistry[QuantizeSpec, Any], ...] = (QUANTIZE, TRANSPOSE)
EXAMPLE = QuantizeSpec("cpu", torch.bfloat16, Scheme("e4m3"), Scheme("e4m3"))


def cast(
    x: Tensor,
    rows: Scheme | None,
    columns: Scheme | None,
    *,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    generator: torch.Generator | None = None,
    tell: bool = False,
    fill: int = 1,
    backend: str = "auto",
) -> Cast:
    """Quantize ``x [T, f]`` for a product that contracts features, and its transpose for one that contracts tokens.

    Args:
        x: the matrix.
        rows: scheme of ``x``. None: it is not needed.
        columns: scheme of the transpose ``[f, T]``. None: it is not needed. ``T`` is padded with zeros to a multiple of
            ``columns.multiple``.
        amax: largest magnitude that the scales of ``x`` must cover: 0-dim for one scale per matrix, ``[R, 1]`` for one
            per row. None: the largest magnitude of the values.
        amax_t: the same for the transpose.
        generator: random generator for stochastic rounding.
        tell: whether the largest magnitude of ``x`` will be needed later
            (:mod:`megalight.ops.quantize.amax_history`). A backend that gets ``amax`` then finds it in the same pass.
        fill: pad features with zeros, too, to a multiple of this, in both results. Scales are those of the values.
        backend: name of a backend.

    Returns:
        the quantized matrix and the quantized transpose; None for what is not needed.
    """
    spec = QuantizeSpec(x.device.type, x.dtype, rows, columns)
    short = -x.shape[1] % fill
    width = x.shape[1] + short if short else None
    return choose(QUANTIZE, spec, backend)(x, rows, columns, amax, amax_t, generator, tell, width)


def transpose(quantized: Quantized, backend: str = "auto") -> Quantized:
    """Transpose a quantized matrix ``[R, K]`` that has one scale. The result is row-major."""
    spec = QuantizeSpec(quantized.data.device.type, quantized.data.dtype, quantized.scheme, quantized.scheme)
    return Quantized(choose(TRANSPOSE, spec, backend)(quantized.data), quantized.scale, quantized.scheme)


def _reference(
    x: Tensor,
    rows: Scheme | None,
    columns: Scheme | None,
    amax: Tensor | None,
    amax_t: Tensor | None,
    generator: torch.Generator | None,
    tell: bool,
    width: int | None,
) -> Cast:
    if width is not None:
        x = F.pad(x, (0, width - x.shape[1]))
    whole = None if rows is None else quantize(x, rows, amax, generator)
    if columns is None:
        return whole, None
    transposed = F.pad(x.t(), (0, -len(x) % columns.multiple))
    return whole, quantize(transposed, columns, amax_t, generator)


TILES = ((0, 0), (1, 0), (1, 128), (128, 128))
"""Tiles that the Triton kernels serve."""


def cast_why_not(dtype: torch.dtype, rows: Scheme | None, columns: Scheme | None) -> str | None:
    """Return why kernels that write quantized values with scales in float32 cannot serve a request, or None."""
    for scheme in (rows, columns):
        if scheme is not None and (scheme.scale not in ("fp32", "power") or scheme.tile not in TILES):
            return f"serves fp32 scales of tiles {', '.join(map(str, TILES))} (0 means all), not {scheme}"
    if dtype not in (*HALF, torch.float32):
        return f"serves bfloat16, float16 and float32, not {dtype}"
    return None


def whole_cast_why_not(dtype: torch.dtype, rows: Scheme | None, columns: Scheme | None) -> str | None:
    """Return why such kernels with one scale per matrix cannot serve a request, or None."""
    for scheme in (rows, columns):
        if scheme is not None and scheme.tile != (0, 0):
            return f"serves one scale per matrix, not tiles of {scheme.tile}"
    return cast_why_not(dtype, rows, columns)


def _triton_why_not(spec: QuantizeSpec) -> str | None:
    return cast_why_not(spec.dtype, spec.rows, spec.columns) or triton_why_not(spec.device, spec.dtype)


QUANTIZE.register(Backend("triton", lazy("megalight.ops.quantize.triton", "cast"), 10, _triton_why_not))
QUANTIZE.register(Backend("reference", _reference, 0, serve_all))


def _transpose_reference(quantized: Tensor) -> Tensor:
    return quantized.t().contiguous()


TRANSPOSE.register(
    Backend("triton", lazy("megalight.ops.quantize.triton", "transpose"), 10, lambda spec: triton_why_not(spec.device))
)
TRANSPOSE.register(Backend("reference", _transpose_reference, 0, serve_all))
