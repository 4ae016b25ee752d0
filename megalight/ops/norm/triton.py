"""Norms: one kernel for the forward (with the residual addition), one for the backward.

Each program of the backward sums weight gradients of its own rows. Another kernel sums over programs, into the main
gradient if there is one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.common import num_sms
from megalight.ops.jit import OVERLAP, Value, cdiv, constexpr, jit, next_power, start_dependents, tl
from megalight.ops.parameter import may_hide, state_of
from megalight.ops.quantize.amax_history import annotate_amax

TILE = 2048
"""Elements that a program handles at once, if rows are shorter than this."""
WARPS_PER_SM = 16
"""Warps of the backward per SM. No more programs than run at once: each writes its own weight gradients."""
STAGES = 2
"""Pipeline stages of the backward: rows that are being loaded or computed."""
SUMMED = {"ROWS": 64, "BLOCK": 32, "num_warps": 4}
"""Programs of the backward and features that are summed at once. Narrow blocks, as there are few features."""


@jit
def _forward(
    x: Value, residual: Value, weight: Value, bias: Value, y: Value,
    total: Value, mean: Value, rstd: Value, parts: Value, rows: Value, size: Value, eps: Value,
    CENTER: constexpr, ADD: constexpr, BIAS: constexpr, MEASURE: constexpr, ROWS: constexpr, BLOCK: constexpr,
    PDL: constexpr,
) -> None:  # fmt: skip
    # A tile `[ROWS, BLOCK]` holds whole rows: sums over a row need no second pass and no other program.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    # Parameters are read before the wait: a recorded step writes none.
    factor = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    start_dependents(PDL)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    # int64: tokens times features exceeds int32 for long batches.
    offsets = row.to(tl.int64)[:, None] * size + column[None, :]
    # Zeros beyond the row do not change its sums, which are divided by the true `size`.
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        # Norm the rounded sum, which is what the next layer and the backward read. Otherwise the backward, which gets
        # `total`, would differentiate another function than the forward computed.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + offsets, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if CENTER:
        center = tl.sum(value, 1) / size
        tl.store(mean + row, center, mask=row < rows)
        # Mask again: columns beyond the row became -mean, which would enter the variance.
        value = tl.where(inside, value - center[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / size + eps)
    tl.store(rstd + row, scale, mask=row < rows)
    out = value * scale[:, None] * factor[None, :]
    if BIAS:
        out += tl.load(bias + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    out = out.to(y.dtype.element_ty)
    tl.store(y + offsets, out, mask=inside)
    if MEASURE:
        # Rows beyond the end hold the bias now, and must not count.
        sizes = tl.where(inside, tl.abs(out.to(tl.float32)), 0.0)
        tl.store(parts + tl.program_id(0), tl.max(tl.max(sizes, 1), 0))


@jit
def _backward(
    grad_y: Value, grad_total: Value, x: Value, weight: Value, mean: Value, rstd: Value, grad_x: Value,
    grad_weight: Value, grad_bias: Value, parts: Value,
    rows: Value, size: Value,
    CENTER: constexpr, ADD: constexpr, BIAS: constexpr, MEASURE: constexpr, ROWS: constexpr, BLOCK: constexpr,
    STAGES: constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    # Weight gradients are summed per program and per row of the tile, in float32 and in a fixed order: no atomics, so
    # the result is the same in every run. Rows are added up once, at the end.
    sum_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    if MEASURE:  # one value per eight neighbors: a value for each would take too many registers
        largest = tl.zeros((ROWS, BLOCK // 8), tl.float32)
    # Programs stride over the rows, so that the loads of all programs are close together in memory at any time.
    for start in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < size)[None, :]
        offsets = row.to(tl.int64)[:, None] * size + column[None, :]
        grad = tl.load(grad_y + offsets, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        if CENTER:
            center = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
            # Rows and columns beyond the end would be -mean, and would count in the sums below.
            value = tl.where(inside, value - center, 0.0)
        value *= scale
        sum_weight += grad * value
        if BIAS:
            sum_bias += grad
        grad *= factor
        # With v = the normed input and g = grad_y * weight: dx = rstd (g - v mean(g v)), and minus mean(g) for layer
        # norm.
        out = grad - value * (tl.sum(grad * value, 1) / size)[:, None]
        if CENTER:
            out -= (tl.sum(grad, 1) / size)[:, None]
        out *= scale
        if ADD:
            # The gradient that the residual stream brings is added before rounding, so the sum is rounded only once.
            out += tl.load(grad_total + offsets, mask=inside, other=0.0).to(tl.float32)
        out = out.to(grad_x.dtype.element_ty)
        tl.store(grad_x + offsets, out, mask=inside)
        if MEASURE:
            sizes = tl.where(inside, tl.abs(out.to(tl.float32)), 0.0)
            largest = tl.maximum(largest, tl.max(tl.reshape(sizes, (ROWS, BLOCK // 8, 8)), 2))
    tl.store(grad_weight + program * size + column, tl.sum(sum_weight, 0), mask=column < size)
    if BIAS:
        tl.store(grad_bias + program * size + column, tl.sum(sum_bias, 0), mask=column < size)
    if MEASURE:
        tl.store(parts + program, tl.max(tl.max(largest, 1), 0))


@jit
def _sum_programs(
    sums: Value, out: Value, programs: Value, size: Value,
    ADD: constexpr, ROWS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < programs)[:, None] & (column < size)[None, :]
        total += tl.load(sums + row[:, None] * size + column[None, :], mask=inside, other=0.0)
    gradient = tl.sum(total, 0)
    if ADD:
        gradient += tl.load(out + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out + column, gradient.to(out.dtype.element_ty), mask=column < size)


def sum_programs(out: Tensor, sums: Tensor, add: bool) -> None:
    """Write or add ``sums [programs, size]`` in float32, summed over programs, to ``out [size]``."""
    programs, size = sums.shape
    _sum_programs[(cdiv(size, SUMMED["BLOCK"]),)](sums, out, programs, size, ADD=add, **SUMMED)


def _add_to_main_grad(parameter: Tensor, sums: Tensor) -> None:
    state = state_of(parameter)
    assert state.main_grad is not None
    # In float32, as they are: main gradients are wider than the parameters.
    sum_programs(state.main_grad, sums, add=not state.touch())
    state.mark_grad_ready()


def _gradient(sums: Tensor, dtype: torch.dtype) -> Tensor:
    out = sums.new_empty(sums.shape[1], dtype=dtype)
    sum_programs(out, sums, add=False)
    return out


@lru_cache
def _tile(size: int) -> dict[str, int]:
    """Return the rows per program, the block width and the number of warps for rows of ``size``."""
    block = max(8, next_power(size))
    # Short rows share a program, so that each thread has enough elements to hide the latency of memory.
    rows = max(1, TILE // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(4, rows * block // 512))}


def _rows(x: Tensor, size: int) -> Tensor:
    """Return ``x`` as a contiguous matrix ``[n, size]``."""
    return (x if x.dim() == 2 else x.reshape(-1, size)).contiguous()


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """Return ``rows`` in the shape of ``x``."""
    return rows if rows.shape == x.shape else rows.view(x.shape)


def _run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, center: bool, measure: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return ``y, total, mean, rstd, parts`` for a contiguous ``x [n, size]``; without a residual ``total`` is ``x``.

    With ``measure``, ``parts`` holds the largest magnitude of ``y`` that each program saw.
    """
    rows, size = x.shape
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if center else None
    tile = _tile(size)
    programs = cdiv(rows, tile["ROWS"])
    parts = torch.empty(programs, dtype=torch.float32, device=x.device) if measure else None
    if rows:
        pdl = OVERLAP.on
        _forward[(programs,)](
            x, residual, weight, bias, y, total, mean, rstd, parts, rows, size, eps,
            CENTER=center, ADD=residual is not None, BIAS=bias is not None, MEASURE=measure, PDL=pdl, launch_pdl=pdl,
            **tile,
        )  # fmt: skip
    return y, total, mean, rstd, parts


def _run_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    center: bool,
    has_bias: bool,
    measure: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return ``grad_x [n, size]`` and, in float32, ``grad_weight``, ``grad_bias`` and ``parts`` of ``grad_x``.

    Gradients of weight and bias are ``[programs, size]``, to be summed over programs.
    """
    rows, size = x.shape
    tile = _tile(size)
    # More programs would write more partial weight gradients `[programs, size]`, which must be read and summed again.
    at_once = max(1, WARPS_PER_SM // tile["num_warps"]) * num_sms(x.device)
    programs = max(1, min(cdiv(rows, tile["ROWS"]), at_once))
    grad_x = torch.empty_like(x)
    grad_weight = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    grad_bias = torch.empty_like(grad_weight) if has_bias else None
    parts = torch.empty(programs, dtype=torch.float32, device=x.device) if measure else None
    _backward[(programs,)](
        grad_y, grad_total, x, weight, mean, rstd, grad_x, grad_weight, grad_bias, parts, rows, size,
        CENTER=center, ADD=grad_total is not None, BIAS=has_bias, MEASURE=measure, STAGES=STAGES, **tile,
    )  # fmt: skip
    return grad_x, grad_weight, grad_bias, parts


def _annotated(x: Tensor, parts: Tensor | None) -> Tensor:
    return x if parts is None else annotate_amax(x, parts)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, center: bool, measure: bool
    ) -> Tensor:
        flat = _rows(x, weight.shape[0])
        y, _, mean, rstd, parts = _run_forward(flat, None, weight, bias, eps, center, measure)
        ctx.save_for_backward(flat, weight, mean, rstd)
        ctx.center, ctx.bias_dtype, ctx.measure = center, None if bias is None else bias.dtype, measure
        return _annotated(_like(y, x), parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, mean, rstd = ctx.saved_tensors
        grad = _rows(grad_y, flat.shape[1])
        has_bias = ctx.bias_dtype is not None
        grad_x, grad_weight, grad_bias, parts = _run_backward(
            grad, None, flat, weight, mean, rstd, ctx.center, has_bias, ctx.measure
        )
        grad_x = _annotated(_like(grad_x, grad_y), parts)
        bias = None if grad_bias is None else _gradient(grad_bias, ctx.bias_dtype)
        return grad_x, _gradient(grad_weight, weight.dtype), bias, None, None, None


class _AddNorm(torch.autograd.Function):
    """A norm between two sublayers.

    ``hidden`` is ``(weight, bias)`` in place of both arguments: see :func:`~megalight.ops.parameter.may_hide`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        hidden: tuple[Tensor, Tensor | None] | None,
        eps: float,
        center: bool,
        measure: bool,
    ) -> tuple[Tensor, Tensor]:
        # If only the sum, or only the norm, is used, the other gradient comes as None: do not make zeros and add them.
        ctx.set_materialize_grads(False)
        if hidden is not None:
            weight, bias = hidden
        assert weight is not None
        size = weight.shape[0]
        flat, other = _rows(x, size), None if residual is None else _rows(residual, size)
        y, total, mean, rstd, parts = _run_forward(flat, other, weight, bias, eps, center, measure)
        # The sum alone is kept, not the two terms: both get the same gradient.
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.center, ctx.bias_dtype = center, None if bias is None else bias.dtype
        ctx.added, ctx.measure, ctx.hidden = residual is not None, measure, hidden
        return _annotated(_like(y, x), parts), x if residual is None else _like(total, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, mean, rstd = ctx.saved_tensors
        # Only the residual stream went on (the norm's output is unused): there is nothing to differentiate.
        if grad_y is None:
            return grad_total, grad_total if ctx.added else None, *[None] * 6
        grad = _rows(grad_y, total.shape[1])
        other = None if grad_total is None else _rows(grad_total, total.shape[1])
        has_bias = ctx.bias_dtype is not None
        grad_x, grad_weight, grad_bias, parts = _run_backward(
            grad, other, total, weight, mean, rstd, ctx.center, has_bias, ctx.measure
        )
        grad_x = _annotated(_like(grad_x, grad_y), parts)
        other = grad_x if ctx.added else None
        if ctx.hidden is not None:
            for parameter, sums in zip(ctx.hidden, (grad_weight, grad_bias), strict=True):
                if sums is not None:
                    _add_to_main_grad(parameter, sums)
            return grad_x, other, *[None] * 6
        bias = None if grad_bias is None else _gradient(grad_bias, ctx.bias_dtype)
        return grad_x, other, _gradient(grad_weight, weight.dtype), bias, *[None] * 4


def _add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, center: bool, measure: bool
) -> tuple[Tensor, Tensor]:
    seen, hidden = ((None, None), (weight, bias)) if may_hide(x, weight, bias) else ((weight, bias), None)
    out: tuple[Tensor, Tensor] = apply(_AddNorm, x, residual, *seen, hidden, eps, center, measure)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, measure: bool = False) -> Tensor:
    """RMS norm over the last dim. With ``measure``, also find the largest magnitude of the result and of ``x.grad``."""
    out: Tensor = apply(_Norm, x, weight, None, eps, False, measure)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, measure: bool = False) -> Tensor:
    """Layer norm over the last dim; ``measure`` as in :func:`rms_norm`."""
    out: Tensor = apply(_Norm, x, weight, bias, eps, True, measure)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, measure: bool = False
) -> tuple[Tensor, Tensor]:
    """Norm of the sum, and the sum, in one kernel. With ``measure``, as in :func:`rms_norm`, but not of the sum."""
    return _add_norm(x, residual, weight, None, eps, False, measure)


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, measure: bool = False
) -> tuple[Tensor, Tensor]:
    """Norm of the sum, and the sum, in one kernel. With ``measure``, as in :func:`rms_norm`, but not of the sum."""
    return _add_norm(x, residual, weight, bias, eps, True, measure)
