"""Quantization to 8 bits in one kernel: reads once, writes data and scales of the matrix and of its transpose."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.jit import UNIT, Value, cdiv, constexpr, jit, tl
from megalight.ops.quantize import TINY
from megalight.ops.quantize.amax_history import annotate_amax
from megalight.ops.quantize.formats import DTYPES, LARGEST, Quantized, Scheme

# A tile is as wide as the blocks of `blockwise` scaling, so no scale needs values of two programs.
BLOCK = 128
WHOLE = {"TOKENS": 128, "FEATURES": 64, "num_warps": 8}
"""A program's tile where the matrix has one scale."""
SQUARES = {"TOKENS": BLOCK, "FEATURES": BLOCK}
"""Its tile otherwise."""
MODES = {(0, 0): "whole", (1, 0): "line", (1, BLOCK): "strip", (BLOCK, BLOCK): "square"}
"""Tile of a scheme -> name for the kernels, by what shares a scale: the whole matrix, a row, 128 elements of a row, or
128 x 128 elements. The name ``"none"`` means that this orientation is not needed.
"""


@jit
def _factor(largest: Value, LARGEST: constexpr, SMALLEST: constexpr, POWER: constexpr) -> Value:
    """Return what values are multiplied by, if ``largest`` is to become the largest code."""
    # Correctly rounded division: the fast one differs by a bit, and quantized values would differ from the reference
    # and other ranks.
    factor = tl.div_rn(LARGEST, tl.maximum(largest, SMALLEST))
    if POWER:
        # Round down to a power of two: only the exponent bits stay.
        factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return factor


@jit
def _quantized(
    x: Value, amax: Value, scale: Value, line: Value, lines: Value, strip: Value, block: Value, strips: Value,
    AXIS: constexpr, MODE: constexpr, LARGEST: constexpr, SMALLEST: constexpr, POWER: constexpr,
) -> Value:  # fmt: skip
    """Scale the tile ``x``, whose contracted dim is ``AXIS``, and write its scales.

    Values that are too large are left to the conversion to 8 bits, which saturates, and keeps NaN.

    ``line`` holds the indices of the tile's rows (columns for axis 0), of ``lines`` in the matrix. The tile is number
    ``strip`` of ``strips`` along the contracted dim, and number ``block`` across it.
    """
    if MODE == "whole":
        # The whole matrix or a whole row does not fit into a tile: their magnitudes come from an earlier pass.
        largest = tl.load(amax)
    elif MODE == "line":
        largest = tl.load(amax + line, mask=line < lines, other=1.0)
    elif MODE == "strip":
        largest = tl.max(tl.abs(x), AXIS)
    else:
        largest = tl.max(tl.max(tl.abs(x), 1), 0)
    factor = _factor(largest, LARGEST, SMALLEST, POWER)
    inverse = tl.div_rn(1.0, factor)
    if MODE == "whole":
        # All programs have the same value, and one writes it.
        tl.store(scale, inverse, mask=(strip == 0) & (block == 0))
    elif MODE == "line":
        tl.store(scale + line, inverse, mask=(line < lines) & (strip == 0))
    elif MODE == "strip":
        # Strips first, so that rows are contiguous: the order in memory that products read.
        tl.store(scale + strip.to(tl.int64) * lines + line, inverse, mask=line < lines)
    else:
        tl.store(scale + block * strips + strip, inverse)
    if MODE == "line" or MODE == "strip":
        factor = tl.expand_dims(factor, AXIS)
    return x * factor


@jit
def whole_factor(
    amax: Value, scale: Value, first: Value, MODE: constexpr, LARGEST: constexpr, SMALLEST: constexpr, POWER: constexpr
) -> Value:
    """Return what a matrix with one scale is multiplied by. The ``first`` program writes the scale."""
    if MODE == "none":
        factor = 1.0
    else:
        factor = _factor(tl.load(amax), LARGEST, SMALLEST, POWER)
        if first:
            tl.store(scale, tl.div_rn(1.0, factor))
    return factor


@jit
def rounded(x: Value, like: Value, HARDWARE: constexpr) -> Value:
    """Round ``x`` (float32) to the dtype of the elements of ``like``, as if it were written, and return it in float32.

    ``HARDWARE``: the kernel is not interpreted. One instruction then rounds two elements to bfloat16; those of Triton's
    conversion take four times as long.
    """
    if HARDWARE and like.dtype.element_ty == tl.bfloat16:
        small = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        small = x.to(like.dtype.element_ty)
    return small.to(tl.float32)


@jit
def write_quantized(
    x: Value, row_data: Value, row_factor: Value, column_data: Value, column_factor: Value, token: Value,
    feature: Value,
    tokens: Value, padded: Value, end: Value, features: Value,
    ROWS: constexpr, COLUMNS: constexpr, FULL: constexpr, TOKENS: constexpr, FEATURES: constexpr,
) -> None:  # fmt: skip
    """Write a tile of a matrix ``[tokens, features]`` with one scale, quantized, and its transpose.

    ``x [TOKENS, FEATURES]`` is float32 and begins at ``token`` and ``feature``. Its features before ``end`` exist; it
    is zero from ``tokens`` on, and the transpose has ``padded`` columns. ``FULL``: nothing of it lies beyond these.
    """
    t = tl.arange(0, TOKENS)
    f = tl.arange(0, FEATURES)
    # Places are 64 bits wide for the tile, and 32 inside it, which takes half the registers.
    if ROWS != "none":
        # Too large values are left to the conversion to 8 bits, which saturates, and keeps NaN.
        small = (x * row_factor).to(row_data.dtype.element_ty)
        corner = row_data + token.to(tl.int64) * features + feature
        where = corner + (t[:, None] * features + f[None, :])
        if FULL:
            tl.store(where, small)
        else:
            tl.store(where, small, mask=(token + t < tokens)[:, None] & (feature + f < end)[None, :])
    if COLUMNS != "none":
        # The factors are loaded apart, also where they are equal, so that quantized values are computed twice: Triton
        # 3.6 for sm_90 has garbled bytes of quantized values that were stored both ways.
        small = tl.trans((x * column_factor).to(column_data.dtype.element_ty))
        corner = column_data + feature.to(tl.int64) * padded + token
        where = corner + (f[:, None] * padded + t[None, :])
        if FULL:
            tl.store(where, small)
        else:
            tl.store(where, small, mask=(feature + f < end)[:, None] & (token + t < padded)[None, :])


@jit
def _cast(
    x: Value, row_data: Value, row_scale: Value, row_amax: Value, column_data: Value, column_scale: Value,
    column_amax: Value, parts: Value,
    tokens: Value, padded: Value, features: Value, width: Value, x_stride: Value,
    ROWS: constexpr, COLUMNS: constexpr, ROW_LARGEST: constexpr, COLUMN_LARGEST: constexpr, SMALLEST: constexpr,
    ROW_POWER: constexpr, COLUMN_POWER: constexpr, TELL: constexpr, UNIT: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    features, x_stride = features * UNIT, x_stride * UNIT
    down, across = tl.program_id(0), tl.program_id(1)
    t = down * BLOCK + tl.arange(0, BLOCK)
    f = across * BLOCK + tl.arange(0, BLOCK)
    inside = (t < tokens)[:, None] & (f < features)[None, :]
    source = x + t.to(tl.int64)[:, None] * x_stride + f[None, :]
    tile = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if TELL:
        tl.store(parts + down * tl.num_programs(1) + across, tl.max(tl.max(tl.abs(tile), 1), 0))
    if ROWS != "none":
        data = _quantized(
            tile, row_amax, row_scale, t, tokens, across, down, tl.cdiv(width, BLOCK),
            1, ROWS, ROW_LARGEST, SMALLEST, ROW_POWER,
        )  # fmt: skip
        where = row_data + t.to(tl.int64)[:, None] * width + f[None, :]
        # Features from `features` to `width` get quantized values of 0.
        tl.store(where, data.to(row_data.dtype.element_ty), mask=(t < tokens)[:, None] & (f < width)[None, :])
    if COLUMNS != "none":
        if ROWS == COLUMNS and COLUMNS == "square" and x.dtype.element_ty == tl.float32:
            # Triton 3.6 for sm_90 garbles bytes of quantized values that are stored both ways; read again, they are
            # computed twice
            tile = tl.load(source, mask=inside, other=0.0)
        data = _quantized(
            tile, column_amax, column_scale, f, width, down, across, tl.cdiv(padded, BLOCK),
            0, COLUMNS, COLUMN_LARGEST, SMALLEST, COLUMN_POWER,
        )  # fmt: skip
        small = data.to(column_data.dtype.element_ty)
        # Written transposed: 8-bit GEMMs need the contracted dim contiguous, and for weight gradients that is the
        # tokens. Columns from `tokens` to `padded` get quantized values of 0.
        where = column_data + f.to(tl.int64)[:, None] * padded + t[None, :]
        tl.store(where, tl.trans(small), mask=(f < width)[:, None] & (t < padded)[None, :])


@jit
def _cast_whole(
    x: Value, row_data: Value, row_scale: Value, row_amax: Value, column_data: Value, column_scale: Value,
    column_amax: Value, parts: Value,
    tokens: Value, padded: Value, features: Value, width: Value, x_stride: Value,
    ROWS: constexpr, COLUMNS: constexpr, ROW_LARGEST: constexpr, COLUMN_LARGEST: constexpr, SMALLEST: constexpr,
    ROW_POWER: constexpr, COLUMN_POWER: constexpr, TELL: constexpr, UNIT: constexpr, FULL: constexpr, TOKENS: constexpr,
    FEATURES: constexpr,
) -> None:  # fmt: skip
    """Cast with one scale per matrix. Programs that run at the same time read whole rows: faster than columns."""
    features, x_stride = features * UNIT, x_stride * UNIT
    across, down = tl.program_id(0), tl.program_id(1)
    token, feature = down * TOKENS, across * FEATURES
    t = tl.arange(0, TOKENS)[:, None]
    f = tl.arange(0, FEATURES)[None, :]
    source = x + token.to(tl.int64) * x_stride + feature + (t * x_stride + f)
    if FULL:
        tile = tl.load(source).to(tl.float32)
    else:
        inside = (token + t < tokens) & (feature + f < features)
        tile = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if TELL:
        tl.store(parts + down * tl.num_programs(0) + across, tl.max(tl.max(tl.abs(tile), 1), 0))
    first = (across == 0) & (down == 0)
    row_factor = whole_factor(row_amax, row_scale, first, ROWS, ROW_LARGEST, SMALLEST, ROW_POWER)
    column_factor = whole_factor(column_amax, column_scale, first, COLUMNS, COLUMN_LARGEST, SMALLEST, COLUMN_POWER)
    write_quantized(
        tile, row_data, row_factor, column_data, column_factor, token, feature, tokens, padded, width, width,
        ROWS, COLUMNS, FULL, TOKENS, FEATURES,
    )  # fmt: skip


def cast(
    x: Tensor,
    rows: Scheme | None,
    columns: Scheme | None,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    generator: torch.Generator | None = None,
    tell: bool = False,
    width: int | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Implement :func:`megalight.ops.quantize.cast`; ``width``: number of features of the results, if more."""
    source = x
    stride, step = x.stride()
    if step != 1:
        x = x.contiguous()
        stride = x.stride(0)
    tokens, features = x.shape
    width = features if width is None else width
    padded = tokens if columns is None else tokens + -tokens % columns.multiple
    whole = None if rows is None else empty_quantized(x, rows, tokens, width)
    # Both orientations of one matrix share a magnitude, and so a scale: find it once.
    same = whole is not None and rows == columns and whole.scheme.tile == (0, 0) and amax_t is amax
    shared = whole.scale if whole is not None and same else None
    transposed = None if columns is None else empty_quantized(x, columns, width, padded, shared)
    # Most sizes are multiples: every layer comes here several times, and a call costs the host more than this.
    unit = UNIT if not (features | stride) % UNIT else math.gcd(features, stride, UNIT)
    given = amax_t is not None
    if amax is None and not given and _lines(rows, columns) and x.numel():
        amax, amax_t = _line_maxima(x, stride, unit)
    if rows is not None and amax is None:
        amax = _amax(x, rows, 1)
    if same:
        amax_t = amax
    elif columns is not None and amax_t is None:
        amax_t = _amax(x, columns, 0)
    if not given and amax_t is not None and amax_t.dim() and width > features:
        amax_t = F.pad(amax_t, (0, width - features))
    one_scale = _one_scale(rows, columns)
    tile = WHOLE if one_scale else SQUARES
    # Rounded up.
    down, across = -(-padded // tile["TOKENS"]), -(-width // tile["FEATURES"])
    parts = torch.empty(down * across, device=x.device) if tell else x
    if tokens and features:
        arguments = (
            x,
            *quantize_arguments(x, whole, amax),
            *quantize_arguments(x, transposed, amax_t),
            parts,
            tokens,
            padded,
            features // unit,
            width,
            stride // unit,
        )
        constants = quantize_constants(rows, columns) | {"TELL": tell, "UNIT": unit}
        if one_scale:
            full = not (padded - tokens or tokens % tile["TOKENS"] or features % tile["FEATURES"])
            _cast_whole[across, down](*arguments, **constants, FULL=full, **tile)
        else:
            _cast[down, across](*arguments, **constants, BLOCK=BLOCK, num_warps=8)
        if tell:
            annotate_amax(source, parts)
    return whole, transposed


@lru_cache
def quantize_constants(rows: Scheme | None, columns: Scheme | None) -> dict[str, Any]:
    """Return what a kernel that writes quantized values is compiled for."""
    return {
        "ROWS": "none" if rows is None else MODES[rows.tile],
        "COLUMNS": "none" if columns is None else MODES[columns.tile],
        "ROW_LARGEST": 1.0 if rows is None else LARGEST[rows.format],
        "COLUMN_LARGEST": 1.0 if columns is None else LARGEST[columns.format],
        "SMALLEST": TINY,
        "ROW_POWER": rows is not None and rows.scale == "power",
        "COLUMN_POWER": columns is not None and columns.scale == "power",
    }


@jit
def _transpose(x: Value, y: Value, rows: Value, columns: Value, BLOCK: constexpr) -> None:
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    tile = tl.load(x + r.to(tl.int64)[:, None] * columns + c[None, :], mask=inside, other=0)
    inside = (c < columns)[:, None] & (r < rows)[None, :]
    tl.store(y + c.to(tl.int64)[:, None] * rows + r[None, :], tl.trans(tile), mask=inside)


def transpose(data: Tensor) -> Tensor:
    """Transpose ``[R, K]`` of one byte each to ``[K, R]``, both row-major."""
    rows, columns = data.shape
    out = data.new_empty(columns, rows)
    if out.numel():
        grid = cdiv(rows, BLOCK), cdiv(columns, BLOCK)
        x = data.contiguous().view(torch.uint8)
        _transpose[grid](x, out.view(torch.uint8), rows, columns, BLOCK=BLOCK, num_warps=8)
    return out


@lru_cache
def _one_scale(*schemes: Scheme | None) -> bool:
    """Return whether each matrix has one scale."""
    return all(scheme is None or scheme.tile == (0, 0) for scheme in schemes)


@lru_cache
def _lines(rows: Scheme | None, columns: Scheme | None) -> bool:
    """Return whether each row and each column has a scale of its own."""
    return rows is not None and columns is not None and MODES[rows.tile] == MODES[columns.tile] == "line"


def empty_quantized(x: Tensor, scheme: Scheme, rows: int, columns: int, scale: Tensor | None = None) -> Quantized:
    """Make room for a quantized ``[rows, columns]`` and, if there are none yet, its scales, on the device of ``x``."""
    device, mode = x.device, MODES[scheme.tile]
    data = torch.empty(rows, columns, dtype=DTYPES[scheme.format], device=device)
    if scale is not None:
        return Quantized(data, scale, scheme)
    if mode == "whole":
        scale = torch.empty(1, 1, device=device)
    elif mode == "line":
        scale = torch.empty(rows, 1, device=device)
    elif mode == "square":
        scale = torch.empty(cdiv(rows, BLOCK), cdiv(columns, BLOCK), device=device)
    else:  # strips, in the order in memory that products read
        scale = torch.empty(cdiv(columns, BLOCK), rows, device=device).t()
    return Quantized(data, scale, scheme)


def _amax(x: Tensor, scheme: Scheme, dim: int) -> Tensor | None:
    """Return magnitudes that one tile cannot know: of the whole matrix or of whole rows."""
    mode = MODES[scheme.tile]
    if mode not in ("whole", "line") or not x.numel():
        return None
    dims = None if mode == "whole" else dim
    found: Tensor = torch.linalg.vector_norm(x, float("inf"), dim=dims, dtype=torch.float32)
    return found


@jit
def _maxima(
    x: Value, rows: Value, columns: Value, tokens: Value, features: Value, x_stride: Value, UNIT: constexpr,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    """Raise the magnitudes of rows and columns by those of a tile. They are bits of floats, ordered as integers are."""
    features, x_stride = features * UNIT, x_stride * UNIT
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (t < tokens)[:, None] & (f < features)[None, :]
    tile = tl.abs(tl.load(x + t.to(tl.int64)[:, None] * x_stride + f[None, :], mask=inside, other=0.0).to(tl.float32))
    tl.atomic_max(rows + t, tl.max(tile, 1).to(tl.int32, bitcast=True), mask=t < tokens, sem="relaxed")
    tl.atomic_max(columns + f, tl.max(tile, 0).to(tl.int32, bitcast=True), mask=f < features, sem="relaxed")


def _line_maxima(x: Tensor, stride: int, unit: int) -> tuple[Tensor, Tensor]:
    """Return the largest magnitudes of rows ``[T]`` and of columns ``[F]``, float32, in one pass."""
    tokens, features = x.shape
    bits = torch.zeros(tokens + features, dtype=torch.int32, device=x.device)
    rows, columns = bits[:tokens], bits[tokens:]
    grid = cdiv(features, BLOCK), cdiv(tokens, BLOCK)
    _maxima[grid](x, rows, columns, tokens, features // unit, stride // unit, UNIT=unit, BLOCK=BLOCK, num_warps=8)
    return rows.view(torch.float32), columns.view(torch.float32)


def quantize_arguments(x: Tensor, cast: Quantized | None, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return quantized values, scales and amax for the kernel; ``x`` stands in for what is not needed."""
    if cast is None:
        return x, x, x
    return cast.data, cast.scale, x if amax is None else amax.contiguous()
