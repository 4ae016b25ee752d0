"""``y = x W^T + b``, with the weight gradient accumulated where the parameter says."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalight.ops.linear import wgrad
from megalight.registry import BackendRegistry

REGISTRIES: tuple[BackendRegistry[wgrad.Spec, Any], ...] = (wgrad.WGRAD,)
EXAMPLE = wgrad.EXAMPLE


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., in] x [out, in] -> [..., out]``.

    A weight or bias with the attribute ``main_grad`` (a tensor of its own shape) receives its gradient there: the
    backward adds to it, calls ``mark_grad_ready()``, and gives autograd nothing. Others get ordinary gradients.
    """
    if getattr(weight, "main_grad", None) is not None or getattr(bias, "main_grad", None) is not None:
        out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return out
    return F.linear(x, weight, bias)


def input_gradient(grad_y: Tensor, weight: Tensor) -> Tensor:
    """``grad_y [..., out] x weight [out, in] -> [..., in]``, in the type of ``grad_y``."""
    return grad_y @ weight.to(grad_y.dtype)


def accumulate_weight_gradient(grad_y: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    """The gradient ``grad_y^T x`` of ``weight [out, in]``, summed over all leading dims.

    Args:
        grad_y: ``[..., out]``.
        x: ``[..., in]``.
        weight: where it has ``main_grad``, the gradient is added there (in float32 for a float32 one, without a
            temporary of that size on CUDA) and ``weight.mark_grad_ready()`` is called.

    Returns:
        None when it went into ``main_grad``, else the gradient in the weight's type.
    """
    grad_y = grad_y.reshape(-1, grad_y.shape[-1])
    x = x.reshape(-1, x.shape[-1]).to(grad_y.dtype)
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        return (grad_y.T @ x).to(weight.dtype)
    wgrad.choose(wgrad.Spec(grad_y.device.type, grad_y.dtype, main_grad.dtype))(main_grad, grad_y, x)
    _mark_ready(weight)
    return None


def accumulate_bias_gradient(grad_y: Tensor, bias: Tensor) -> Tensor | None:
    """The gradient of ``bias [out]``: ``grad_y [..., out]`` summed over all leading dims; as for the weight."""
    main_grad: Tensor | None = getattr(bias, "main_grad", None)
    grad_y = grad_y.reshape(-1, grad_y.shape[-1])
    if main_grad is None:
        return grad_y.sum(0).to(bias.dtype)
    main_grad.add_(grad_y.sum(0, dtype=main_grad.dtype))
    _mark_ready(bias)
    return None


def _mark_ready(parameter: Tensor) -> None:
    parameter.mark_grad_ready()  # type: ignore[attr-defined]


class _Linear(torch.autograd.Function):
    """The linear layer of parameters that have a main gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The parameters are kept by reference: what saved-tensor hooks hand back would lack their attributes.
        ctx.weight, ctx.bias = weight, bias
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.x_dtype = x.dtype
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x,) = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad_x = input_gradient(grad_y, ctx.weight).to(ctx.x_dtype) if need_x else None
        grad_weight = accumulate_weight_gradient(grad_y, x, ctx.weight) if need_weight else None
        grad_bias = accumulate_bias_gradient(grad_y, ctx.bias) if need_bias else None
        return grad_x, grad_weight, grad_bias
