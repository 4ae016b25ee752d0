"""Activations and their gradients as codes: one kernel reads the inputs, and writes codes both ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.activation.triton import _slope, _value
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.quantize import Scheme
from megalight.ops.quantize.triton import (
    codes_arguments,
    codes_constants,
    empty_codes,
    rounded,
    whole_factor,
    write_codes,
)
from megalight.ops.unwritten import Told

FORWARD = {"TOKENS": 64, "FEATURES": 128, "num_warps": 8}
BACKWARD = {"TOKENS": 64, "FEATURES": 64, "num_warps": 8}
"""Tokens and features of a program. A transposed row of a tile is as many bytes as it has tokens."""


@jit
def _load(x: Value, inside: Value, FULL: constexpr) -> Value:
    """Load a tile in float32; ``FULL``: without a mask."""
    return (tl.load(x) if FULL else tl.load(x, mask=inside, other=0.0)).to(tl.float32)


@jit
def _largest(x: Value) -> Value:
    return tl.max(tl.max(tl.abs(x), 1), 0)


@jit
def _forward(
    x: Value,
    row_codes: Value,
    row_scale: Value,
    row_amax: Value,
    column_codes: Value,
    column_scale: Value,
    column_amax: Value,
    parts: Value,
    tokens: Value,
    padded: Value,
    size: Value,
    KIND: constexpr,
    GATED: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    ROW_LARGEST: constexpr,
    COLUMN_LARGEST: constexpr,
    SMALLEST: constexpr,
    ROW_POWER: constexpr,
    COLUMN_POWER: constexpr,
    FULL: constexpr,
    HARDWARE: constexpr,
    TOKENS: constexpr,
    FEATURES: constexpr,
) -> None:
    # Programs that run at the same time read whole rows.
    across, down = tl.program_id(0), tl.program_id(1)
    token, feature = down * TOKENS, across * FEATURES
    t = tl.arange(0, TOKENS)[:, None]
    f = tl.arange(0, FEATURES)[None, :]
    inside = (token + t < tokens) & (feature + f < size)
    first = (across == 0) & (down == 0)
    row_factor = whole_factor(row_amax, row_scale, first, ROWS, ROW_LARGEST, SMALLEST, ROW_POWER)
    column_factor = whole_factor(column_amax, column_scale, first, COLUMNS, COLUMN_LARGEST, SMALLEST, COLUMN_POWER)
    if GATED:
        # `x [rows, 2 size]`: gate is the first half of a row, up the second.
        # int64 for the tile: tokens times features exceeds int32 for long batches.
        place = x + token.to(tl.int64) * 2 * size + feature + (t * (2 * size) + f)
        out = _value(_load(place, inside, FULL), KIND) * _load(place + size, inside, FULL)
    else:
        out = _value(_load(x + token.to(tl.int64) * size + feature + (t * size + f), inside, FULL), KIND)
    out = rounded(out, x, HARDWARE)
    if not FULL:
        out = tl.where(inside, out, 0.0)  # the activation of zero is not always zero
    tl.store(parts + down * tl.num_programs(0) + across, _largest(out))
    write_codes(
        out, row_codes, row_factor, column_codes, column_factor,
        token, feature, tokens, padded, size, size,
        ROWS, COLUMNS, FULL, TOKENS, FEATURES,
    )  # fmt: skip


@jit
def _backward(
    x: Value,
    grad_y: Value,
    row_codes: Value,
    row_scale: Value,
    row_amax: Value,
    column_codes: Value,
    column_scale: Value,
    column_amax: Value,
    parts: Value,
    tokens: Value,
    padded: Value,
    size: Value,
    KIND: constexpr,
    GATED: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    ROW_LARGEST: constexpr,
    COLUMN_LARGEST: constexpr,
    SMALLEST: constexpr,
    ROW_POWER: constexpr,
    COLUMN_POWER: constexpr,
    FULL: constexpr,
    HARDWARE: constexpr,
    TOKENS: constexpr,
    FEATURES: constexpr,
) -> None:
    # Programs that run at the same time read whole rows.
    across, down = tl.program_id(0), tl.program_id(1)
    token, feature = down * TOKENS, across * FEATURES
    t = tl.arange(0, TOKENS)[:, None]
    f = tl.arange(0, FEATURES)[None, :]
    inside = (token + t < tokens) & (feature + f < size)
    first = (across == 0) & (down == 0)
    row_factor = whole_factor(row_amax, row_scale, first, ROWS, ROW_LARGEST, SMALLEST, ROW_POWER)
    column_factor = whole_factor(column_amax, column_scale, first, COLUMNS, COLUMN_LARGEST, SMALLEST, COLUMN_POWER)
    corner = token.to(tl.int64) * size + feature
    grad = _load(grad_y + corner + (t * size + f), inside, FULL)
    if GATED:
        place = x + token.to(tl.int64) * 2 * size + feature + (t * (2 * size) + f)
        gate = _load(place, inside, FULL)
        out = rounded(grad * _load(place + size, inside, FULL) * _slope(gate, KIND), x, HARDWARE)
        largest = _largest(out)
        write_codes(
            out, row_codes, row_factor, column_codes, column_factor,
            token, feature, tokens, padded, size, 2 * size,
            ROWS, COLUMNS, FULL, TOKENS, FEATURES,
        )  # fmt: skip
        out = rounded(grad * _value(gate, KIND), x, HARDWARE)
        largest = tl.maximum(largest, _largest(out))
        write_codes(
            out, row_codes, row_factor, column_codes, column_factor,
            token, feature + size, tokens, padded, 2 * size, 2 * size,
            ROWS, COLUMNS, FULL, TOKENS, FEATURES,
        )  # fmt: skip
    else:
        value = _load(x + corner + (t * size + f), inside, FULL)
        out = rounded(grad * _slope(value, KIND), x, HARDWARE)
        largest = _largest(out)
        write_codes(
            out, row_codes, row_factor, column_codes, column_factor,
            token, feature, tokens, padded, size, size,
            ROWS, COLUMNS, FULL, TOKENS, FEATURES,
        )  # fmt: skip
    tl.store(parts + down * tl.num_programs(0) + across, largest)


def cast_activation(
    x: Tensor, kind: str, gates: bool, rows: Scheme | None, columns: Scheme | None, amax: Tensor
) -> Told:
    """Implement :func:`megalight.ops.activation.codes.cast_activation`."""
    size = x.shape[1] // 2 if gates else x.shape[1]
    return _run(_forward, FORWARD, (x.contiguous(),), size, size, kind, gates, rows, columns, amax)


def cast_activation_gradient(
    grad_y: Tensor, x: Tensor, kind: str, gates: bool, rows: Scheme | None, columns: Scheme | None, amax: Tensor
) -> Told:
    """Implement :func:`megalight.ops.activation.codes.cast_activation_gradient`."""
    inputs = x.contiguous(), grad_y.contiguous()
    return _run(_backward, BACKWARD, inputs, grad_y.shape[1], x.shape[1], kind, gates, rows, columns, amax)


def _run(
    kernel: Any,
    tile: dict[str, int],
    inputs: tuple[Tensor, ...],
    size: int,
    features: int,
    kind: str,
    gates: bool,
    rows: Scheme | None,
    columns: Scheme | None,
    amax: Tensor,
) -> Told:
    """Run a kernel over ``size`` features of all tokens; it writes codes of ``features`` features."""
    x = inputs[0]
    tokens = len(x)
    padded = tokens if columns is None else tokens + -tokens % columns.multiple
    whole = None if rows is None else empty_codes(x, rows, tokens, features)
    transposed = None if columns is None else empty_codes(x, columns, features, padded)
    grid = cdiv(size, tile["FEATURES"]), cdiv(padded, tile["TOKENS"])
    parts = torch.empty(grid[0] * grid[1], device=x.device)
    if tokens and size:
        kernel[grid](
            *inputs,
            *codes_arguments(x, whole, amax),
            *codes_arguments(x, transposed, amax),
            parts,
            tokens,
            padded,
            size,
            KIND=kind,
            GATED=gates,
            **codes_constants(rows, columns),
            FULL=not (padded % tile["TOKENS"] or size % tile["FEATURES"] or padded - tokens),
            HARDWARE=x.is_cuda,
            **tile,
        )
    return (whole, transposed), parts
