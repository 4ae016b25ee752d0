"""Gated activations of two tensors, as two linear layers return them: one kernel for each direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.activation.triton import BLOCK, _slope, _value
from megalight.ops.common import apply, once_differentiable
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl


@jit
def _forward(gate: Value, up: Value, y: Value, count: Value, KIND: constexpr, BLOCK: constexpr) -> None:
    # int64: tokens times features exceeds int32 for long batches.
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = _value(tl.load(gate + place, mask=inside, other=0.0).to(tl.float32), KIND)
    out = value * tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, out.to(y.dtype.element_ty), mask=inside)


@jit
def _backward(
    gate: Value,
    up: Value,
    grad_y: Value,
    grad_gate: Value,
    grad_up: Value,
    count: Value,
    KIND: constexpr,
    BLOCK: constexpr,
) -> None:
    # The activation is computed again: this costs less than to store its result in the forward.
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_y + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_gate + place, (grad * other * _slope(x, KIND)).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + place, (grad * _value(x, KIND)).to(grad_up.dtype.element_ty), mask=inside)


class _GatedPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        count = y.numel()
        if count:
            _forward[(cdiv(count, BLOCK),)](gate, up, y, count, KIND=kind, BLOCK=BLOCK, num_warps=4)
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
            _backward[(cdiv(count, BLOCK),)](
                gate, up, grad_y.contiguous(), grad_gate, grad_up, count, KIND=ctx.kind, BLOCK=BLOCK, num_warps=4
            )
        return grad_gate, grad_up, None


def gated_pair(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """``act(gate) * up``, element by element."""
    out: Tensor = apply(_GatedPair, gate, up, kind)
    return out
