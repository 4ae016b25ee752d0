"""Activations, plain and gated: one kernel for the forward and one for the backward."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.jit import OVERLAP, UNIT, Value, cdiv, constexpr, jit, next_power, start_dependents, tl
from megalight.ops.quantize.amax_history import annotate_amax

BLOCK = 2048


@jit
# KIND is a compile-time constant: each kind becomes a kernel of its own, and the chains of `if` cost nothing.
def activated(x: Value, KIND: constexpr) -> Value:
    """``act(x)`` in float32."""
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "gelu":
        # 0.7071 = 1 / sqrt(2).
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        # 1.5958 = 2 sqrt(2 / pi). The sigmoid does not overflow, and is one exponential.
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif KIND == "relu":
        y = tl.maximum(x, 0.0)
    elif KIND == "squared_relu":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        y = tl.sigmoid(x)
    return y


@jit
def _slope(x: Value, KIND: constexpr) -> Value:
    """The derivative of ``act`` at ``x`` in float32."""
    if KIND == "silu":
        s = tl.sigmoid(x)
        d = s * (1.0 + x * (1.0 - s))
    elif KIND == "gelu":
        # The normal distribution and, times x, its density: 0.3989 = 1 / sqrt(2 pi).
        d = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        # 0.134145 = 3 * 0.044715.
        d = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif KIND == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        d = s * (1.0 + 1.702 * x * (1.0 - s))
    elif KIND == "relu":
        d = tl.where(x > 0.0, 1.0, 0.0)
    elif KIND == "squared_relu":
        d = 2.0 * tl.maximum(x, 0.0)
    else:
        s = tl.sigmoid(x)
        d = s * (1.0 - s)
    return d


@jit
def _triton_forward(
    x: Value, y: Value, parts: Value, size: Value, stride: Value,
    KIND: constexpr, GATED: constexpr, MEASURE: constexpr, UNIT: constexpr, BLOCK: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    start_dependents(PDL)
    size, stride = size * UNIT, stride * UNIT
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    if GATED:
        # `x [rows, 2 size]`: gate is the first half of a row, up the second.
        gate = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * stride + size + column, mask=inside, other=0.0).to(tl.float32)
        out = activated(gate, KIND) * up
    else:
        out = activated(tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32), KIND)
    out = out.to(y.dtype.element_ty)  # round first: the largest magnitude is that of the stored values
    tl.store(y + row * size + column, out, mask=inside)
    if MEASURE:
        largest = tl.max(tl.where(inside, tl.abs(out.to(tl.float32)), 0.0), 0)
        tl.store(parts + row * tl.num_programs(1) + tl.program_id(1), largest)


@jit
def _triton_backward(
    x: Value, grad_y: Value, grad_x: Value, parts: Value,
    size: Value, stride: Value, grad_stride: Value,
    KIND: constexpr, GATED: constexpr, MEASURE: constexpr, UNIT: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    size, stride, grad_stride = size * UNIT, stride * UNIT, grad_stride * UNIT
    # x is read again, and the activation computed again: this costs less than to store its result in the forward.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    grad = tl.load(grad_y + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    out_type = grad_x.dtype.element_ty
    if GATED:
        first = row * 2 * size + column
        gate = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * stride + size + column, mask=inside, other=0.0).to(tl.float32)
        out = (grad * up * _slope(gate, KIND)).to(out_type)
        tl.store(grad_x + first, out, mask=inside)
        other = (grad * activated(gate, KIND)).to(out_type)
        tl.store(grad_x + first + size, other, mask=inside)
        magnitude = tl.maximum(tl.abs(out.to(tl.float32)), tl.abs(other.to(tl.float32)))
    else:
        value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        out = (grad * _slope(value, KIND)).to(out_type)
        tl.store(grad_x + row * size + column, out, mask=inside)
        magnitude = tl.abs(out.to(tl.float32))
    if MEASURE:
        largest = tl.max(tl.where(inside, magnitude, 0.0), 0)
        tl.store(parts + row * tl.num_programs(1) + tl.program_id(1), largest)


def _spaced(x: Tensor) -> tuple[Tensor, int]:
    """Return ``x`` and the elements from one row to the next. Only matrices may have gaps between their rows."""
    if x.is_contiguous():
        return x, x.shape[-1]
    if x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]:
        return x, x.stride(0)
    return x.contiguous(), x.shape[-1]


def _parts(y: Tensor, grid: tuple[int, int]) -> Tensor:
    """Room for the largest magnitude that each program meets."""
    return y.new_empty(grid[0] * grid[1], dtype=torch.float32)


class _TritonActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, gated: bool, measure: bool) -> Tensor:
        x, stride = _spaced(x)
        size = x.shape[-1] // 2 if gated else x.shape[-1]
        y = x.new_empty(*x.shape[:-1], size)
        # One program per block of a row: a row's gate and up are `size` apart, so blocks must not cross rows.
        block, unit = min(BLOCK, next_power(size)), math.gcd(size, stride, UNIT)
        grid = y.numel() // max(1, size), cdiv(size, block)
        parts = _parts(y, grid) if measure else y  # a kernel that does not measure writes no parts
        if grid[0]:
            pdl = OVERLAP.on
            _triton_forward[grid](
                x, y, parts, size // unit, stride // unit,
                KIND=kind, GATED=gated, MEASURE=measure, UNIT=unit, BLOCK=block, PDL=pdl, launch_pdl=pdl, num_warps=4,
            )  # fmt: skip
        ctx.save_for_backward(x)
        ctx.kind, ctx.gated, ctx.measure, ctx.grid = kind, gated, measure, (grid, size, unit, block)
        return annotate_amax(y, parts) if measure else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        # Hooks on saved tensors may have closed the gaps.
        (x, stride), (grad_y, grad_stride) = _spaced(ctx.saved_tensors[0]), _spaced(grad_y)
        grad_x = x.new_empty(x.shape)
        grid, size, unit, block = ctx.grid  # the gradient has the shape of the output
        if grad_stride != size:
            unit = math.gcd(unit, grad_stride)
        parts = _parts(grad_y, grid) if ctx.measure else grad_y
        if grid[0]:
            _triton_backward[grid](
                x, grad_y, grad_x, parts, size // unit, stride // unit, grad_stride // unit,
                KIND=ctx.kind, GATED=ctx.gated, MEASURE=ctx.measure, UNIT=unit, BLOCK=block, num_warps=4,
            )  # fmt: skip
        return annotate_amax(grad_x, parts) if ctx.measure else grad_x, None, None, None


def _apply(x: Tensor, kind: str, gated: bool, measure: bool) -> Tensor:
    out: Tensor = apply(_TritonActivation, x, kind, gated, measure)
    return out


def activation(x: Tensor, kind: str, measure: bool = False) -> Tensor:
    """``act(x)``; ``measure``: of it, and of the gradient of ``x``, the largest magnitude is then known."""
    return _apply(x, kind, False, measure)


def gated(x: Tensor, kind: str, measure: bool = False) -> Tensor:
    """``act(gate) * up`` with ``x = gate | up`` along the last dim; ``measure`` as for :func:`activation`."""
    return _apply(x, kind, True, measure)


@jit
def _pair_forward(gate: Value, up: Value, y: Value, count: Value, KIND: constexpr, BLOCK: constexpr) -> None:
    # int64: tokens times features exceeds int32 for long batches.
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = activated(tl.load(gate + place, mask=inside, other=0.0).to(tl.float32), KIND)
    out = value * tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, out.to(y.dtype.element_ty), mask=inside)


@jit
def _pair_backward(
    gate: Value, up: Value, grad_y: Value, grad_gate: Value, grad_up: Value, count: Value,
    KIND: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    # The activation is computed again: this costs less than to store its result in the forward.
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_y + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_gate + place, (grad * other * _slope(x, KIND)).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + place, (grad * activated(x, KIND)).to(grad_up.dtype.element_ty), mask=inside)


class _GatedPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        count = y.numel()
        if count:
            _pair_forward[(cdiv(count, BLOCK),)](gate, up, y, count, KIND=kind, BLOCK=BLOCK, num_warps=4)
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        count = gate.numel()
        if count:
            _pair_backward[(cdiv(count, BLOCK),)](
                gate, up, grad_y.contiguous(), grad_gate, grad_up, count, KIND=ctx.kind, BLOCK=BLOCK, num_warps=4
            )
        return grad_gate, grad_up, None


def gated_pair(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """``act(gate) * up``, element by element."""
    out: Tensor = apply(_GatedPair, gate, up, kind)
    return out


TILE = 2048
"""Elements of the output that a program handles at once."""
WIDEST = 1024
"""Features of a tile, at most."""


@jit
def _halves(x: Value, place: Value, size: Value, inside: Value, offset: Value, clamp: Value, CLAMP: constexpr) -> Any:
    """Return gate and up (plus offset) in float32, clamped, and where each of them passes gradients."""
    gate = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + place + size, mask=inside, other=0.0).to(tl.float32)
    gate_open, up_open = inside, inside
    if CLAMP:
        # At the limit itself the gradient passes, as in `torch.clamp`.
        gate_open, up_open = gate <= clamp, tl.abs(up) <= clamp
        gate = tl.where(gate > clamp, clamp, gate)  # unlike minimum and maximum, comparisons keep NaN
        up = tl.where(up > clamp, clamp, tl.where(up < -clamp, -clamp, up))
    return gate, up + offset, gate_open, up_open


@jit
def _weighted_forward(
    x: Value, weights: Value, y: Value,
    rows: Value, size: Value, offset: Value, clamp: Value,
    KIND: constexpr, GATED: constexpr, CLAMP: constexpr, WEIGHTED: constexpr, ROWS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    # 64 bits: rows times features may pass 2^31.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < size)
    if GATED:
        gate, up, _, _ = _halves(x, row * 2 * size + column, size, inside, offset, clamp, CLAMP)
        out = activated(gate, KIND) * up
    else:
        out = activated(tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32), KIND)
    if WEIGHTED:
        out *= tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(y + row * size + column, out.to(y.dtype.element_ty), mask=inside)


@jit
def _weighted_backward(
    x: Value, weights: Value, grad_y: Value, grad_x: Value, grad_weights: Value,
    rows: Value, size: Value, offset: Value, clamp: Value,
    KIND: constexpr, GATED: constexpr, CLAMP: constexpr, WEIGHTED: constexpr, ROWS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """One program has whole rows, so that it sums the gradients of their weights by itself."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    if WEIGHTED:
        weight = tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
    out_type = grad_x.dtype.element_ty
    # Whole tiles are added up, and summed over features once at the end.
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < size)
        grad = tl.load(grad_y + row * size + column, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            place = row * 2 * size + column
            gate, up, gate_open, up_open = _halves(x, place, size, inside, offset, clamp, CLAMP)
            value = activated(gate, KIND)
            if WEIGHTED:
                # Of the weight: the sum over features of grad * y, in float32. One program has the whole row, so no
                # atomics.
                total += grad * value * up
                grad *= weight
            tl.store(grad_x + place, tl.where(gate_open, grad * up * _slope(gate, KIND), 0.0).to(out_type), mask=inside)
            tl.store(grad_x + place + size, tl.where(up_open, grad * value, 0.0).to(out_type), mask=inside)
        else:
            place = row * size + column
            value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            # Only with weights: without them, the plain activation serves.
            total += grad * activated(value, KIND)
            tl.store(grad_x + place, (grad * weight * _slope(value, KIND)).to(out_type), mask=inside)
    if WEIGHTED:
        first = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(grad_weights + first, tl.sum(total, 1).to(grad_weights.dtype.element_ty), mask=first < rows)


@lru_cache
def _tile(size: int) -> dict[str, int]:
    """Return the shape of a tile. Its width divides ``size`` if that is a multiple of 128."""
    # `size & -size` is the largest power of two that divides `size`: no tile is partly masked then.
    block = min(WIDEST, max(128, size & -size), next_power(size))
    return {"ROWS": max(1, TILE // block), "BLOCK": block, "num_warps": 4}


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor | None, kind: str, gates: bool, offset: float, clamp: float | None
    ) -> Tensor:
        # The kernel reads rows one behind the other.
        x, weights = x.contiguous(), None if weights is None else weights.contiguous()
        size = x.shape[-1] // 2 if gates else x.shape[-1]
        y = x.new_empty(*x.shape[:-1], size)
        ctx.save_for_backward(x, weights)
        ctx.options = {"KIND": kind, "GATED": gates, "CLAMP": clamp is not None, "WEIGHTED": weights is not None}
        ctx.options.update(_tile(size), offset=float(offset), clamp=float(clamp or 0.0))
        if y.numel():
            rows = y.numel() // size
            grid = cdiv(rows, ctx.options["ROWS"]), cdiv(size, ctx.options["BLOCK"])
            _weighted_forward[grid](x, weights, y, rows, size, **ctx.options)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weights = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weights = None if weights is None else torch.zeros_like(weights)
        if grad_y.numel():
            size = grad_y.shape[-1]
            rows = grad_y.numel() // size
            grid = (cdiv(rows, ctx.options["ROWS"]),)
            _weighted_backward[grid](x, weights, grad_y.contiguous(), grad_x, grad_weights, rows, size, **ctx.options)
        return grad_x, grad_weights, None, None, None, None


def weighted(x: Tensor, kind: str, gates: bool, weights: Tensor | None, offset: float, clamp: float | None) -> Tensor:
    """``act(gate) * (up + offset) * weights`` with clamped halves, or ``act(x) * weights``."""
    out: Tensor = apply(_Weighted, x, weights, kind, gates, offset, clamp)
    return out
