"""Formats of 8 and 4 bits: their limits, and rounding to them.

==== ======== ======= ========================= ===================================================
name bits     largest type                      source
==== ======== ======= ========================= ===================================================
e4m3 1-4-3    448     ``float8_e4m3fn``         OCP 8-bit floating point 1.0; NaN, no infinity
e5m2 1-5-2    57344   ``float8_e5m2``           OCP 8-bit floating point 1.0
e2m1 1-2-1    6       ``float4_e2m1fn_x2``      OCP microscaling 1.0; no NaN; two elements a byte
e8m0 8        2^127   ``float8_e8m0fnu``        OCP microscaling 1.0; scales alone; 255 is NaN
==== ======== ======= ========================= ===================================================

Values beyond the largest saturate here. torch's own casts saturate in some releases and give NaN in others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

Format: TypeAlias = Literal["e4m3", "e5m2", "e2m1"]
LARGEST: dict[str, float] = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the bits 0 to 7; bit 3 is the sign."""


def to_fp8(x: Tensor, name: Format) -> Tensor:
    """Round float32 to the nearest value, with ties to even and saturation. NaN stays NaN."""
    largest = LARGEST[name]
    # clamp keeps NaN: a broken value must stay visible.
    return x.clamp(-largest, largest).to(DTYPES[name])


def to_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest e2m1 value, with ties to even and saturation: its bits, ``uint8`` 0 to 15. NaN becomes 0."""
    size = x.abs()
    # The limits are the midpoints between neighboring values. `>` or `>=` sends a tie to the even code.
    steps = (size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5.0)
    code = torch.stack([step.to(torch.uint8) for step in steps]).sum(0, dtype=torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


@lru_cache(maxsize=8)
def _e2m1_values(device: torch.device) -> Tensor:
    """Return the magnitudes by code. They are copied to the device once: a CUDA graph cannot copy from the host."""
    return torch.tensor(E2M1, dtype=torch.float32, device=device)


def to_e2m1_stochastic(x: Tensor, uniform: Tensor) -> Tensor:
    """Round to one of the two neighboring values at random, so that the expected value is ``x``. Returns bits.

    Args:
        x: any shape.
        uniform: random numbers in [0, 1) of the same shape.
    """
    values = _e2m1_values(x.device)
    size = x.abs().clamp(max=E2M1[-1])
    # At most 6, so that `below + 1` exists for the largest value; its distance to `high` is then 0.
    below = (torch.bucketize(size, values, right=True) - 1).clamp(0, 6)
    low, high = values[below], values[below + 1]
    # Up with probability (size - low) / (high - low): E[code value] = size.
    code = (below + (uniform * (high - low) < size - low)).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def pack_e2m1(data: Tensor) -> Tensor:
    """Pack bits ``[..., n]`` (even ``n``) to ``float4_e2m1fn_x2 [..., n / 2]``, the first of a pair in low bits."""
    return (data[..., 0::2] | (data[..., 1::2] << 4)).contiguous().view(torch.float4_e2m1fn_x2)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the float32 values ``[..., n]`` of ``float4_e2m1fn_x2 [..., n / 2]``."""
    pairs = packed.view(torch.uint8)
    data = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
    values = _e2m1_values(packed.device)[(data & 7).long()]
    # Quantized values with bit 3 set, and -0 for code 8.
    return torch.where(data > 7, -values, values)


def power_below(x: Tensor) -> Tensor:
    """Round positive normal float32 down to a power of two. Infinity and NaN stay."""
    bits = x.view(torch.int32)
    # Keep the exponent bits alone: the mantissa becomes 1.0.
    return torch.where(x.isfinite(), (bits & 0x7F800000).view(torch.float32), x)


def to_e8m0(x: Tensor) -> Tensor:
    """Round positive float32 *up* to a power of two, as ``float8_e8m0fnu``. 0 becomes the smallest one, 2^-127."""
    mantissa, exponent = torch.frexp(x.double())
    # frexp gives x = m 2^e with m in [0.5, 1): 2^e is the power above x, except that an exact power has m = 0.5. In
    # float64, because float32 has subnormal values there, which a GPU may flush to 0.
    code = exponent + 127 - (mantissa == 0.5).to(exponent.dtype)
    code = torch.where(x == 0, 0, code).clamp(0, 254)
    return torch.where(x.isfinite(), code, 255).to(torch.uint8).view(torch.float8_e8m0fnu)


def e8m0_value(scale: Tensor) -> Tensor:
    """Return the float64 value of ``float8_e8m0fnu``."""
    code = scale.view(torch.uint8)
    value = torch.exp2(code.double() - 127)
    return torch.where(code == 255, torch.nan, value)


class Scheme(NamedTuple):
    """How to quantize a matrix ``[R, K]`` that a product contracts over ``K``.

    Attributes:
        format: format of the elements.
        tile: rows and columns that share one scale; 0 means all.
        scale: kind of the scales: ``fp32``; ``power`` (of two, in fp32); ``e8m0`` (microscaling); ``e4m3`` (NVFP4,
            together with one fp32 scale of the whole matrix).
        stochastic: whether to round stochastically, which is unbiased (e2m1 only).
        hadamard: whether to rotate sixteen neighbors along ``K`` first, which spreads outliers. Both factors of a
            product must be rotated; the rotations then cancel.
    """

    format: Format
    tile: tuple[int, int] = (0, 0)
    scale: Literal["fp32", "power", "e8m0", "e4m3"] = "fp32"
    stochastic: bool = False
    hadamard: bool = False

    @property
    def multiple(self) -> int:
        """``K`` must be a multiple of this: 8-bit GEMMs take 16 elements at a time, microscaling 32."""
        return 32 if self.scale == "e8m0" else 16


@dataclass(slots=True, eq=False)
class Quantized:
    """A quantized matrix ``[R, K]``: ``value = code * scale (* global_scale)``.

    Attributes:
        data: quantized values ``[R, K]``; ``[R, K / 2]`` for 4 bits, with two values per byte.
        scale: ``[ceil(R / tile rows), ceil(K / tile columns)]``.
        scheme: how the matrix was quantized.
        global_scale: 0-dim float32 (NVFP4 only).
    """

    data: Tensor
    scale: Tensor
    scheme: Scheme
    global_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(R, K)``."""
        rows, columns = self.data.shape
        return rows, columns * 2 if self.scheme.format == "e2m1" else columns

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Quantized values, scales and, if there is one, the global scale, for :meth:`of_tensors`."""
        return (self.data, self.scale) if self.global_scale is None else (self.data, self.scale, self.global_scale)

    @property
    def restore(self) -> Callable[..., Quantized]:
        """A function that rebuilds the matrix from its :attr:`tensors`."""
        return partial(Quantized.of_tensors, self.scheme)

    @staticmethod
    def of_tensors(scheme: Scheme, *tensors: Tensor) -> Quantized:
        """Rebuild a matrix from its :attr:`tensors`."""
        data, scale, *rest = tensors
        return Quantized(data, scale, scheme, *rest)

    def copy_(self, other: Quantized) -> Quantized:
        """Copy quantized values and scales from another matrix with the same scheme. Returns this matrix."""
        for own, new in zip(self.tensors, other.tensors, strict=True):
            own.copy_(new)
        return self

    def dequantize(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the values ``[R, K]``, which are exact in float64."""
        data = unpack_e2m1(self.data) if self.scheme.format == "e2m1" else self.data
        scale = e8m0_value(self.scale) if self.scheme.scale == "e8m0" else self.scale.to(torch.float64)
        if self.global_scale is not None:
            scale = scale * self.global_scale
        rows, columns = self.shape
        return (data.to(torch.float64) * spread(scale, self.scheme.tile, rows, columns)).to(dtype)


Cast: TypeAlias = tuple[Quantized | None, Quantized | None]


def spread(scale: Tensor, tile: tuple[int, int], rows: int, columns: int) -> Tensor:
    """Expand one scale per tile to one per element, ``[rows, columns]`` (or broadcastable to it)."""
    for dim, (size, length) in enumerate(zip(tile, (rows, columns), strict=True)):
        # Tiles of size 0 (all) and 1 have a dim that broadcasts by itself, or one entry per row.
        if size > 1:
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, length)
    return scale
