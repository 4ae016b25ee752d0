"""Quantization to 8 and 4 bits with scales: of a matrix and of its transpose, in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import HALF, lazy, serve_all, triton_why_not
from megalight.ops.quantize.formats import Quantized as Quantized
from megalight.ops.quantize.formats import Scheme as Scheme
from megalight.ops.quantize.reference import amax_of as amax_of
from megalight.ops.quantize.reference import quantize as quantize
from megalight.ops.quantize.reference import scales_of as scales_of
from megalight.ops.quantize.reference import tile_amax as tile_amax
from megalight.registry import Backend, BackendRegistry, remembered

Cast: TypeAlias = tuple[Quantized | None, Quantized | None]


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
TRANSPOSE: BackendRegistry[QuantizeSpec, Callable[[Tensor], Tensor]] = BackendRegistry("transpose_codes")
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
    return _choose(spec, backend)(x, rows, columns, amax, amax_t, generator, tell, width)


def transpose(codes: Quantized, backend: str = "auto") -> Quantized:
    """Transpose a quantized matrix ``[R, K]`` that has one scale. The result is row-major."""
    spec = QuantizeSpec(codes.data.device.type, codes.data.dtype, codes.scheme, codes.scheme)
    return Quantized(_choose_transpose(spec, backend)(codes.data), codes.scale, codes.scheme)


@remembered
def _choose_transpose(spec: QuantizeSpec, backend: str) -> Callable[[Tensor], Tensor]:
    return TRANSPOSE.select(spec, backend).fn


@remembered
def _choose(spec: QuantizeSpec, backend: str) -> CastFn:
    return QUANTIZE.select(spec, backend).fn


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
    """Return why kernels that write codes with scales in float32 cannot serve a request, or None."""
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


def _transpose_reference(codes: Tensor) -> Tensor:
    return codes.t().contiguous()


TRANSPOSE.register(
    Backend("triton", lazy("megalight.ops.quantize.triton", "transpose"), 10, lambda spec: triton_why_not(spec.device))
)
TRANSPOSE.register(Backend("reference", _transpose_reference, 0, serve_all))
