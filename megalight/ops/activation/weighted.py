"""Activations times one weight per row: one kernel for the forward, one for both gradients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.ops.activation.triton import _slope, _value
from megalight.ops.common import apply, once_differentiable
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl

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
def _forward(
    x: Value,
    weights: Value,
    y: Value,
    rows: Value,
    size: Value,
    offset: Value,
    clamp: Value,
    KIND: constexpr,
    GATED: constexpr,
    CLAMP: constexpr,
    WEIGHTED: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
) -> None:
    # 64 bits: rows times features may pass 2^31.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < size)
    if GATED:
        gate, up, _, _ = _halves(x, row * 2 * size + column, size, inside, offset, clamp, CLAMP)
        out = _value(gate, KIND) * up
    else:
        out = _value(tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32), KIND)
    if WEIGHTED:
        out *= tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(y + row * size + column, out.to(y.dtype.element_ty), mask=inside)


@jit
def _backward(
    x: Value,
    weights: Value,
    grad_y: Value,
    grad_x: Value,
    grad_weights: Value,
    rows: Value,
    size: Value,
    offset: Value,
    clamp: Value,
    KIND: constexpr,
    GATED: constexpr,
    CLAMP: constexpr,
    WEIGHTED: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
) -> None:
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
            value = _value(gate, KIND)
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
            total += grad * _value(value, KIND)
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
            _forward[grid](x, weights, y, rows, size, **ctx.options)
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
            _backward[grid](x, weights, grad_y.contiguous(), grad_x, grad_weights, rows, size, **ctx.options)
        return grad_x, grad_weights, None, None, None, None


def weighted(x: Tensor, kind: str, gates: bool, weights: Tensor | None, offset: float, clamp: float | None) -> Tensor:
    """``act(gate) * (up + offset) * weights`` with clamped halves, or ``act(x) * weights``."""
    out: Tensor = apply(_Weighted, x, weights, kind, gates, offset, clamp)
    return out
