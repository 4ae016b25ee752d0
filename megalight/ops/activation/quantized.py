"""FP8 activations: an activation between two GEMMs in 8 bits reads and writes quantized values alone.

First the fused cast of an activation and of its gradient, then :func:`stored`, which keeps the input of any
activation in 8 bits for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.ops.activation import activation, gated, torch_activation, torch_gated
from megalight.ops.activation.triton import _slope, activated
from megalight.ops.autograd import QuantizedCasts, apply, elided_output, once_differentiable
from megalight.ops.common import serve_all, triton_why_not
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.quantize import Scheme, amax_of, cast, whole_cast_why_not
from megalight.ops.quantize.formats import to_fp8
from megalight.ops.quantize.triton import (
    empty_quantized,
    quantize_arguments,
    quantize_constants,
    rounded,
    whole_factor,
    write_quantized,
)
from megalight.registry import Backend, BackendRegistry, choose

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
    x: Value, row_data: Value, row_scale: Value, row_amax: Value, column_data: Value, column_scale: Value,
    column_amax: Value, parts: Value,
    tokens: Value, padded: Value, size: Value,
    KIND: constexpr, GATED: constexpr, ROWS: constexpr, COLUMNS: constexpr, ROW_LARGEST: constexpr,
    COLUMN_LARGEST: constexpr, SMALLEST: constexpr, ROW_POWER: constexpr, COLUMN_POWER: constexpr, FULL: constexpr,
    HARDWARE: constexpr, TOKENS: constexpr, FEATURES: constexpr,
) -> None:  # fmt: skip
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
        out = activated(_load(place, inside, FULL), KIND) * _load(place + size, inside, FULL)
    else:
        out = activated(_load(x + token.to(tl.int64) * size + feature + (t * size + f), inside, FULL), KIND)
    out = rounded(out, x, HARDWARE)
    if not FULL:
        out = tl.where(inside, out, 0.0)  # the activation of zero is not always zero
    tl.store(parts + down * tl.num_programs(0) + across, _largest(out))
    write_quantized(
        out, row_data, row_factor, column_data, column_factor,
        token, feature, tokens, padded, size, size,
        ROWS, COLUMNS, FULL, TOKENS, FEATURES,
    )  # fmt: skip


@jit
def _backward(
    x: Value, grad_y: Value, row_data: Value, row_scale: Value, row_amax: Value, column_data: Value,
    column_scale: Value, column_amax: Value, parts: Value,
    tokens: Value, padded: Value, size: Value,
    KIND: constexpr, GATED: constexpr, ROWS: constexpr, COLUMNS: constexpr, ROW_LARGEST: constexpr,
    COLUMN_LARGEST: constexpr, SMALLEST: constexpr, ROW_POWER: constexpr, COLUMN_POWER: constexpr, FULL: constexpr,
    HARDWARE: constexpr, TOKENS: constexpr, FEATURES: constexpr,
) -> None:  # fmt: skip
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
        write_quantized(
            out, row_data, row_factor, column_data, column_factor,
            token, feature, tokens, padded, size, 2 * size,
            ROWS, COLUMNS, FULL, TOKENS, FEATURES,
        )  # fmt: skip
        out = rounded(grad * activated(gate, KIND), x, HARDWARE)
        largest = tl.maximum(largest, _largest(out))
        write_quantized(
            out, row_data, row_factor, column_data, column_factor,
            token, feature + size, tokens, padded, 2 * size, 2 * size,
            ROWS, COLUMNS, FULL, TOKENS, FEATURES,
        )  # fmt: skip
    else:
        value = _load(x + corner + (t * size + f), inside, FULL)
        out = rounded(grad * _slope(value, KIND), x, HARDWARE)
        largest = _largest(out)
        write_quantized(
            out, row_data, row_factor, column_data, column_factor,
            token, feature, tokens, padded, size, size,
            ROWS, COLUMNS, FULL, TOKENS, FEATURES,
        )  # fmt: skip
    tl.store(parts + down * tl.num_programs(0) + across, largest)


def triton_cast_activation(
    x: Tensor, kind: str, gates: bool, rows: Scheme | None, columns: Scheme | None, amax: Tensor
) -> QuantizedCasts:
    """Implement :func:`megalight.ops.activation.quantized.cast_activation`."""
    size = x.shape[1] // 2 if gates else x.shape[1]
    return _run(_forward, FORWARD, (x.contiguous(),), size, size, kind, gates, rows, columns, amax)


def triton_cast_activation_gradient(
    grad_y: Tensor, x: Tensor, kind: str, gates: bool, rows: Scheme | None, columns: Scheme | None, amax: Tensor
) -> QuantizedCasts:
    """Implement :func:`megalight.ops.activation.quantized.cast_activation_gradient`."""
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
) -> QuantizedCasts:
    """Run a kernel over ``size`` features of all tokens; it writes quantized values of ``features`` features."""
    x = inputs[0]
    tokens = len(x)
    padded = tokens if columns is None else tokens + -tokens % columns.multiple
    whole = None if rows is None else empty_quantized(x, rows, tokens, features)
    transposed = None if columns is None else empty_quantized(x, columns, features, padded)
    grid = cdiv(size, tile["FEATURES"]), cdiv(padded, tile["TOKENS"])
    parts = torch.empty(grid[0] * grid[1], device=x.device)
    if tokens and size:
        kernel[grid](
            *inputs, *quantize_arguments(x, whole, amax), *quantize_arguments(x, transposed, amax), parts, tokens,
            padded, size,
            KIND=kind, GATED=gates, **quantize_constants(rows, columns),
            FULL=not (padded % tile["TOKENS"] or size % tile["FEATURES"] or padded - tokens), HARDWARE=x.is_cuda,
            **tile,
        )  # fmt: skip
    return (whole, transposed), parts


class QuantizedActivationSpec(NamedTuple):
    """A request: device type, dtype, name of the activation, schemes of the matrix and of its transpose."""

    device: str
    dtype: torch.dtype
    kind: str
    rows: Scheme | None
    columns: Scheme | None


Forward: TypeAlias = Callable[[Tensor, str, bool, Scheme | None, Scheme | None, Tensor], QuantizedCasts]
Backward: TypeAlias = Callable[[Tensor, Tensor, str, bool, Scheme | None, Scheme | None, Tensor], QuantizedCasts]
CAST_ACTIVATION: BackendRegistry[QuantizedActivationSpec, Forward] = BackendRegistry("cast_activation")
CAST_ACTIVATION_GRADIENT: BackendRegistry[QuantizedActivationSpec, Backward] = BackendRegistry(
    "cast_activation_gradient"
)


def cast_activation(
    x: Tensor,
    kind: str,
    gates: bool,
    rows: Scheme | None,
    columns: Scheme | None,
    amax: Tensor,
    backend: str = "auto",
) -> QuantizedCasts:
    """Cast ``act(x)`` or, if gated, ``act(gate) * up``, rounded to the dtype of ``x [T, f]`` or ``[T, 2 f]``.

    Args:
        x: the input of the activation.
        kind: name of the activation.
        gates: whether ``x`` is gate and up.
        rows, columns: as for :func:`~megalight.ops.quantize.cast`.
        amax: what the scales cover, 0-dim float32.
        backend: name of a backend.

    Returns:
        the casts, and magnitudes of which the largest is that of what was cast.
    """
    spec = QuantizedActivationSpec(x.device.type, x.dtype, kind, rows, columns)
    return choose(CAST_ACTIVATION, spec, backend)(x, kind, gates, rows, columns, amax)


def cast_activation_gradient(
    grad_y: Tensor,
    x: Tensor,
    kind: str,
    gates: bool,
    rows: Scheme | None,
    columns: Scheme | None,
    amax: Tensor,
    backend: str = "auto",
) -> QuantizedCasts:
    """Cast the gradient of ``x``, rounded to its dtype, from that of the output; see :func:`cast_activation`."""
    spec = QuantizedActivationSpec(x.device.type, x.dtype, kind, rows, columns)
    return choose(CAST_ACTIVATION_GRADIENT, spec, backend)(grad_y, x, kind, gates, rows, columns, amax)


def _plain(x: Tensor, kind: str, gates: bool) -> Tensor:
    return torch_gated(x, kind) if gates else torch_activation(x, kind)


def _cast_reference(
    x: Tensor, kind: str, gates: bool, rows: Scheme | None, columns: Scheme | None, amax: Tensor
) -> QuantizedCasts:
    y = _plain(x, kind, gates)
    return cast(y, rows, columns, amax=amax, amax_t=amax), amax_of(y)


def _cast_gradient_reference(
    grad_y: Tensor, x: Tensor, kind: str, gates: bool, rows: Scheme | None, columns: Scheme | None, amax: Tensor
) -> QuantizedCasts:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(_plain(leaf, kind, gates), leaf, grad_y)
    return cast(grad, rows, columns, amax=amax, amax_t=amax), amax_of(grad)


def _triton_why_not(spec: QuantizedActivationSpec) -> str | None:
    return whole_cast_why_not(spec.dtype, spec.rows, spec.columns) or triton_why_not(spec.device, spec.dtype)


CAST_ACTIVATION.register(Backend("triton", triton_cast_activation, 10, _triton_why_not))
CAST_ACTIVATION.register(Backend("reference", _cast_reference, 0, serve_all))
CAST_ACTIVATION_GRADIENT.register(Backend("triton", triton_cast_activation_gradient, 10, _triton_why_not))
CAST_ACTIVATION_GRADIENT.register(Backend("reference", _cast_gradient_reference, 0, serve_all))


class _OfQuantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, gates: bool, backend: str, written: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind, ctx.gates = kind, gates
        if written:
            return (gated if gates else activation)(x, kind, backend)
        shape = (len(x), x.shape[1] // 2 if gates else x.shape[1])
        return elided_output(shape, x, partial(cast_activation, x.detach(), kind, gates))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,) = ctx.saved_tensors
        make = partial(cast_activation_gradient, grad_y, x.detach(), ctx.kind, ctx.gates)
        return elided_output(tuple(x.shape), x, make), None, None, None, None


def activation_of_quantized(x: Tensor, kind: str, gates: bool, backend: str = "auto", *, written: bool) -> Tensor:
    """Return ``act(x)``, or ``act(gate) * up``, of ``x [T, f]`` or ``[T, 2 f]``; the gradient of ``x`` is not written.

    It is elided (:mod:`megalight.ops.autograd`): ``x`` must come from a GEMM in 8 bits, and nothing else may read its
    gradient. With ``written=False`` the output is elided, too: the next product must know its scales beforehand.
    ``backend`` is that of the activation that is written.
    """
    out: Tensor = apply(_OfQuantized, x.contiguous(), kind, gates, backend, written)
    return out


Function: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]
"""``(x, weights)`` -> the activation."""


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, function: Function) -> Tensor:
        ctx.function, ctx.dtype = function, x.dtype
        # Without a scale: inputs of an activation are near 1, and e4m3 holds 2^-9 to 448. Larger ones saturate.
        ctx.save_for_backward(to_fp8(x, "e4m3"), weights)
        return function(x, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        quantized, weights = ctx.saved_tensors
        x = quantized.to(ctx.dtype).requires_grad_()
        weights = None if weights is None else weights.detach().requires_grad_()
        inputs = [x] if weights is None else [x, weights]
        with torch.enable_grad():
            y = ctx.function(x, weights)
        grads = torch.autograd.grad(y, inputs, grad_y)
        return grads[0], None if weights is None else grads[1], None


def stored(x: Tensor, weights: Tensor | None, function: Function) -> Tensor:
    """Return ``function(x, weights)``, and keep ``x`` as e4m3: one byte per element, and no other tensor of its size.

    The output is exact. Gradients are those at the rounded ``x``, and so is that of ``weights``. The backward pass
    computes the function again.
    """
    if not torch.is_grad_enabled():
        return function(x, weights)
    out: Tensor = apply(_Stored, x, weights, function)
    return out
