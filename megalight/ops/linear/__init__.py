"""``y = x W^T + b``, with the weight gradient accumulated where the parameter says."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import apply, once_differentiable
from megalight.ops.linear import wgrad
from megalight.ops.linear.deferred import queue_for
from megalight.ops.linear.inputs import recipe_of, save_cast, save_input, saved_input
from megalight.ops.parameter import add_gradient, main_grad_of, precision_of
from megalight.ops.quantize import Quantized
from megalight.registry import BackendRegistry

REGISTRIES: tuple[BackendRegistry[wgrad.Spec, Any], ...] = (wgrad.WGRAD,)
EXAMPLE = wgrad.EXAMPLE


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., in] x [out, in] -> [..., out]``.

    A weight or bias with a main gradient (:mod:`megalight.ops.parameter`) receives its gradient there, and autograd is
    given nothing. Others get ordinary gradients.
    Of an ``x`` with a recipe (:mod:`megalight.ops.linear.inputs`) the recipe is kept, and the backward makes it again.
    A weight with a precision (:mod:`megalight.ops.linear.low_precision`) is multiplied as that says.
    """
    precision = precision_of(weight)
    if precision is not None and not torch.is_grad_enabled():
        return precision.product(x, weight, bias)
    if precision is None and recipe_of(x) is None and main_grad_of(weight) is None and main_grad_of(bias) is None:
        return F.linear(x, weight, bias)
    out: Tensor = apply(_Linear, x, weight, bias)
    return out


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``x W^T + b``, without a graph; into ``out [n, out]``, of an ``x [n, in]`` and weight of one plain type."""
    if out is not None:
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
    precision = precision_of(weight)
    return F.linear(x, weight, bias) if precision is None else precision.product(x, weight, bias)


def product_and_save(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In the forward of an autograd function of ``(x, weight, ...)``: the product, and ``x`` saved as it is needed."""
    precision, needed = precision_of(weight), ctx.needs_input_grad[1]
    if precision is None:
        save_input(ctx, x, needed)
        return F.linear(x, weight, bias)
    if not needed or recipe_of(x) is not None:
        save_input(ctx, x, needed)
        return precision.product(x, weight, bias)
    y, x_t = precision.product_and_cast(x, weight, bias)
    save_cast(ctx, x_t)
    return y


def input_gradient(grad_y: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """``grad_y [..., out] x weight [out, in] -> [..., in]``, in its type; ``out`` as of :func:`product`."""
    if out is not None:
        return torch.mm(grad_y, weight, out=out)
    precision = precision_of(weight)
    return grad_y @ weight.to(grad_y.dtype) if precision is None else precision.input_gradient(grad_y, weight)


def accumulate_weight_gradient(grad_y: Tensor, x: Tensor | Quantized, weight: Tensor) -> Tensor | None:
    """The gradient ``grad_y^T x`` of ``weight [out, in]``, summed over all leading dims.

    Args:
        grad_y: ``[..., out]``.
        x: ``[..., in]``; where ``weight`` has a precision, perhaps cast already.
        weight: where it has a main gradient, the gradient is added there (in float32 for a float32 one, without a
            temporary of that size on CUDA) and ``mark_grad_ready()`` is called; both later, inside
            :func:`~megalight.ops.linear.deferred.deferring`.

    Returns:
        None when it goes into the main gradient, else the gradient in the weight's type.
    """
    if (queue := queue_for(weight)) is not None:
        held = x.detach() if isinstance(x, Tensor) else x  # a saved tensor brings its place in the graph along
        queue.put(weight, grad_y, lambda: lambda: held)
        return None
    if main_grad_of(weight) is not None:
        wgrad.add(weight, grad_y, x)
        return None
    if (precision := precision_of(weight)) is not None:
        return precision.weight_gradient(grad_y, x, weight.dtype)
    assert isinstance(x, Tensor)
    grad_y = grad_y.reshape(-1, grad_y.shape[-1])
    x = x.reshape(-1, x.shape[-1]).to(grad_y.dtype)
    return (grad_y.T @ x).to(weight.dtype)


def accumulate_bias_gradient(grad_y: Tensor, bias: Tensor) -> Tensor | None:
    """The gradient of ``bias [out]``: ``grad_y [..., out]`` summed over all leading dims; as for the weight."""
    main_grad = main_grad_of(bias)
    grad_y = grad_y.reshape(-1, grad_y.shape[-1])
    if main_grad is None:
        return grad_y.sum(0).to(bias.dtype)
    add_gradient(bias, grad_y.sum(0, dtype=main_grad.dtype))
    return None


class _Linear(torch.autograd.Function):
    """The linear layer of parameters with a main gradient or a precision, or of an input with a recipe."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The parameters are kept by reference: what saved-tensor hooks hand back would lack their state.
        ctx.weight, ctx.bias = weight, bias
        ctx.x_dtype = x.dtype
        return product_and_save(ctx, x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad_x = input_gradient(grad_y, ctx.weight).to(ctx.x_dtype) if need_x else None
        grad_weight = accumulate_weight_gradient(grad_y, saved_input(ctx), ctx.weight) if need_weight else None
        grad_bias = accumulate_bias_gradient(grad_y, ctx.bias) if need_bias else None
        return grad_x, grad_weight, grad_bias
