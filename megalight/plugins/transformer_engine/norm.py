"""Norms by TransformerEngine's kernels: one pass forward, one and a sum over rows backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.common import HALF, once_differentiable, whole_why_not
from megalight.ops.norm import Spec
from megalight.ops.norm.reference import of_sum
from megalight.plugins.transformer_engine.package import KERNELS, dtype_code, kernel
from megalight.plugins.transformer_engine.package import why_not as package_why_not

MINIMUM = "2.1"
NO_MARGIN, NOT_CENTERED = 0, False
"""Use all multiprocessors, and a weight that is the factor itself, not the factor minus one."""


def _why_not(spec: Spec, kind: str) -> str | None:
    if spec.dtype not in (*HALF, torch.float32):
        return f"serves bfloat16, float16 and float32, not {spec.dtype}"
    if spec.dtype != spec.weight_dtype:
        return f"needs a weight in the dtype of the input, {spec.dtype}"
    kernels = [f"{KERNELS}:{kind}_{way}" for way in ("fwd", "bwd")]
    reason = whole_why_not(spec.divided)
    return reason or package_why_not(spec.device, f"the norm ({kind})", MINIMUM, *kernels)


def rms_why_not(spec: Spec) -> str | None:
    """Return why it cannot serve RMS norm, or None."""
    return _why_not(spec, "rmsnorm")


def layer_why_not(spec: Spec) -> str | None:
    """Return why it cannot serve layer norm, or None."""
    return _why_not(spec, "layernorm")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, weight.shape[0]).contiguous()
        # The kernel saves the inverse deviation in float32, with which the backward needs no
        # second pass for statistics.
        y, _, rstd = kernel("rmsnorm_fwd")(flat, weight, eps, None, None, dtype_code(x.dtype), NO_MARGIN, NOT_CENTERED)
        ctx.save_for_backward(flat, weight, rstd)
        out: Tensor = y.view(x.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, rstd = ctx.saved_tensors
        grad = grad_y.reshape(flat.shape).contiguous()
        grad_x, grad_weight = kernel("rmsnorm_bwd")(grad, flat, rstd, weight, NO_MARGIN, NOT_CENTERED)
        return grad_x.view(grad_y.shape), grad_weight, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        flat = x.reshape(-1, weight.shape[0]).contiguous()
        # The kernel always adds a bias.
        shift = torch.zeros_like(weight) if bias is None else bias
        y, mean, rstd = kernel("layernorm_fwd")(
            flat, weight, shift, eps, None, None, dtype_code(x.dtype), NO_MARGIN, NOT_CENTERED
        )
        ctx.save_for_backward(flat, weight, mean, rstd)
        ctx.has_bias = bias is not None
        out: Tensor = y.view(x.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, mean, rstd = ctx.saved_tensors
        grad = grad_y.reshape(flat.shape).contiguous()
        grad_x, grad_weight, grad_bias = kernel("layernorm_bwd")(
            grad, flat, mean, rstd, weight, NO_MARGIN, NOT_CENTERED
        )
        # The gradient of the zeros is dropped.
        return grad_x.view(grad_y.shape), grad_weight, grad_bias if ctx.has_bias else None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dim."""
    out: Tensor = _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return out


add_rms_norm = of_sum(rms_norm)
add_layer_norm = of_sum(layer_norm)
