"""Activations that keep their input in 8 bits for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megalight.ops.common import apply, once_differentiable
from megalight.ops.quantize.formats import to_fp8

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
        codes, weights = ctx.saved_tensors
        x = codes.to(ctx.dtype).requires_grad_()
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
