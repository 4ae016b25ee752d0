"""Quantized matrices: codes and scales, and the scheme that says which elements share a scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalight.ops.quantize.formats import Format, e8m0_value, unpack_e2m1


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
        """``K`` must be a multiple of this: 8-bit products take 16 elements at a time, microscaling 32."""
        return 32 if self.scale == "e8m0" else 16


@dataclass(slots=True, eq=False)
class Quantized:
    """A quantized matrix ``[R, K]``: ``value = code * scale (* global_scale)``.

    Attributes:
        data: codes ``[R, K]``; ``[R, K / 2]`` for 4 bits, with two codes per byte.
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
        """Codes, scales and, if there is one, the global scale, for :meth:`of_tensors`."""
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
        """Copy codes and scales from another matrix with the same scheme. Returns this matrix."""
        for own, new in zip(self.tensors, other.tensors, strict=True):
            own.copy_(new)
        return self

    def dequantize(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the values ``[R, K]``, which are exact in float64."""
        codes = unpack_e2m1(self.data) if self.scheme.format == "e2m1" else self.data
        scale = e8m0_value(self.scale) if self.scheme.scale == "e8m0" else self.scale.to(torch.float64)
        if self.global_scale is not None:
            scale = scale * self.global_scale
        rows, columns = self.shape
        return (codes.to(torch.float64) * spread(scale, self.scheme.tile, rows, columns)).to(dtype)


def spread(scale: Tensor, tile: tuple[int, int], rows: int, columns: int) -> Tensor:
    """Expand one scale per tile to one per element, ``[rows, columns]`` (or broadcastable to it)."""
    for dim, (size, length) in enumerate(zip(tile, (rows, columns), strict=True)):
        # Tiles of size 0 (all) and 1 have a dim that broadcasts by itself, or one entry per row.
        if size > 1:
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, length)
    return scale
