"""Quantization in plain torch, exactly as the formats define it, with the random Hadamard transform of NVFP4."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.quantize.formats import (
    LARGEST,
    Quantized,
    Scheme,
    e2m1_codes,
    e2m1_codes_stochastic,
    e8m0_value,
    pack_e2m1,
    power_below,
    spread,
    to_e8m0,
    to_fp8,
)

# A fixed random rotation of sixteen neighboring elements: a Hadamard matrix with random signs.
#
# It is orthogonal, so ``(a H)(b H)^T = a b^T``. It spreads an outlier over sixteen elements, so that fewer of the
# others round to 0. See https://arxiv.org/abs/2509.25149, section 4.2.


SIZE = 16
SIGNS = (1, -1, 1, 1, -1, -1, 1, -1, 1, 1, -1, 1, -1, -1, -1, 1)
"""Drawn once: according to the paper, one choice for all layers and steps is as good as many."""


@lru_cache(maxsize=8)
def rotation(device: torch.device) -> Tensor:
    """Return the rotation ``[16, 16]``: orthogonal, float32."""
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
    """Return the scales (value = code * scale) for each ``amax``, as :func:`quantize` computes them."""
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
    # The factor is multiplied, not divided by: kernels do the same, so codes are equal bit by bit.
    data = to_fp8(x * spread(factor, scheme.tile, *x.shape), scheme.format)
    return Quantized(data, 1.0 / factor, scheme)


def _microscale(x: Tensor, scheme: Scheme) -> Quantized:
    """Microscaling: each scale is the smallest power of two with which nothing saturates."""
    scale = to_e8m0(tile_amax(x, scheme.tile) / LARGEST[scheme.format])
    # In float64: 2^-127 is subnormal in float32.
    scaled = (x.double() / spread(e8m0_value(scale), scheme.tile, *x.shape)).float()
    data = pack_e2m1(e2m1_codes(scaled)) if scheme.format == "e2m1" else to_fp8(scaled, scheme.format)
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
        codes = e2m1_codes_stochastic(scaled, uniform)
    else:
        codes = e2m1_codes(scaled)
    return Quantized(pack_e2m1(codes), scale, scheme, decode)
