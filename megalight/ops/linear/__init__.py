"""``y = x W^T + b``, with the weight gradient accumulated in the parameter's main gradient, if it has one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.batch_invariant import MODE, refuse
from megalight.ops.batch_invariant.product import product as invariant_product
from megalight.ops.common import HALF, apply, fp8_why_not, lazy, once_differentiable, triton_why_not
from megalight.ops.linear import aligned, weight_gradient
from megalight.ops.linear.low_precision import LowPrecision, precision_of
from megalight.ops.linear.weight_gradient import queue_for
from megalight.ops.note import recipe_of, save_cast, save_input, saved_input
from megalight.ops.parameter import ParameterState, main_grad_of, may_hide, state_of
from megalight.ops.quantize import Quantized
from megalight.ops.quantized_weight import QuantizedWeight, readable, stored_of
from megalight.ops.sum_rows import sum_rows
from megalight.registry import BackendRegistry

REGISTRIES: tuple[BackendRegistry[weight_gradient.WeightGradientSpec, Any], ...] = (weight_gradient.WGRAD,)
EXAMPLE = weight_gradient.EXAMPLE


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., in] x [out, in] -> [..., out]``.

    If a weight or bias has a main gradient (:mod:`megalight.ops.parameter`), its gradient is added there, and autograd
    gets None. Otherwise it gets an ordinary gradient.

    If ``x`` has a recipe (:mod:`megalight.ops.note`), only the recipe is kept, and the backward computes ``x``
    again. If a weight has a precision (:mod:`megalight.ops.linear.low_precision`), its GEMMs use that. If it is
    quantized (:mod:`megalight.ops.quantized_weight`), GEMMs dequantize it, and the backward keeps only the quantized
    values.
    """
    # The state is read here once, and not by a function for each of its parts: every layer comes here several times.
    state: ParameterState | None = getattr(weight, "megalight", None)
    precision: LowPrecision | None = None if state is None else state.precision
    if MODE.on and not torch.is_grad_enabled():
        return product(x, weight, bias)
    if precision is not None and not torch.is_grad_enabled():
        # No backward will come: cast only what the forward product needs.
        return precision.product(x, weight, bias)
    if state is not None and state.stored is not None and not torch.is_grad_enabled():
        return _of_quantized(x, weight, bias, state.stored)
    own = state is not None and (state.main_grad is not None or precision is not None or state.stored is not None)
    # The plain case goes to torch, whose autograd is written in C++ and keeps fewer things on the host.
    if not (own or MODE.on) and recipe_of(x) is None and main_grad_of(bias) is None:
        if not torch.is_grad_enabled() and takes_gemv(x, weight):
            single: Tensor = single_product(x, weight, bias)
            return single
        # Here and below in place, as a function of its own would be called for every layer.
        odd = (weight.shape[0] | weight.shape[1]) % aligned.MULTIPLE and aligned.pays(weight, weight.shape)
        return aligned.product(x, weight, bias) if odd else F.linear(x, weight, bias)
    hidden = may_hide(x, weight, bias)
    out: Tensor = apply(_Linear, x, None, None, (weight, bias)) if hidden else apply(_Linear, x, weight, bias, None)
    return out


FEW = 64
"""Tokens up to which a weight in e4m3 is not decoded before its product."""


def _of_quantized(x: Tensor, weight: Tensor, bias: Tensor | None, stored: QuantizedWeight) -> Tensor:
    """``x [..., in]`` times a quantized weight, without a graph."""
    if x.numel() <= FEW * x.shape[-1] and x.numel() and reads_fp8(x, weight, stored):
        y: Tensor = few_tokens_product(x, weight, bias)
        return y
    return product(x, stored.values(), bias)


def reads_fp8(x: Tensor, weight: Tensor, stored: QuantizedWeight) -> bool:
    """Return whether kernels of few tokens read the values of a weight ``[..., out, in]`` themselves."""
    block = stored.data.shape[-1]
    return (
        stored.form == "fp8"
        and not stored.away
        and weight.shape[-1] % 16 == 0  # rows begin at multiples of 16 bytes
        and (block == weight.shape[-1] or block in (32, 64, 128, 256, 512))
        and _takes_half(x, weight)
        and fp8_why_not("cuda") is None
    )


def takes_gemv(x: Tensor, weight: Tensor) -> bool:
    """Return whether ``x`` is a single token for which the kernel of ``ops/linear/gemv.py`` is made."""
    if x.numel() != weight.shape[1]:
        return False
    state: ParameterState | None = getattr(weight, "megalight", None)
    if state is not None and state.stored is not None:
        return reads_fp8(x, weight, state.stored)
    # rows begin at multiples of 16 bytes
    return weight.is_contiguous() and not weight.shape[1] % 8 and _takes_half(x, weight)


def _takes_half(x: Tensor, weight: Tensor) -> bool:
    return (
        x.is_cuda
        and not MODE.on
        and weight.dtype in HALF
        and x.dtype == weight.dtype
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cuda")
        and triton_why_not("cuda") is None
    )


single_product = lazy("megalight.ops.linear.gemv", "gemv")
few_tokens_product = lazy("megalight.ops.linear.weight_only", "weight_only_product")


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return ``x W^T + b`` without a graph; ``out [n, out]`` needs ``x [n, in]`` and a weight of one plain dtype."""
    if MODE.on:
        return _invariant(x, weight, bias, out)
    if out is not None:
        weight = readable(weight)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
    if (precision := precision_of(weight)) is not None:
        return precision.product(x, weight, bias)
    if (stored := stored_of(weight)) is not None:
        return _of_quantized(x, weight, bias, stored)
    odd = (weight.shape[0] | weight.shape[1]) % aligned.MULTIPLE and aligned.pays(weight, weight.shape)
    return aligned.product(x, weight, bias) if odd else F.linear(x, weight, bias)


def _invariant(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if precision_of(weight) is not None:
        refuse("products in 8 or 4 bits, whose scales follow from the whole batch")
    y = invariant_product(x, readable(weight), bias)
    return y if out is None else out.copy_(y)


def product_and_save(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, needed: bool) -> Tensor:
    """For the forward of an autograd function: return the product, and save ``x`` if the weight gradient is needed."""
    state: ParameterState | None = getattr(weight, "megalight", None)
    precision: LowPrecision | None = None if state is None else state.precision
    if MODE.on:
        save_input(ctx, x, needed)
        return _invariant(x, weight, bias)
    if precision is None:
        save_input(ctx, x, needed)
        if state is not None and state.stored is not None:
            weight = readable(weight)
        odd = (weight.shape[0] | weight.shape[1]) % aligned.MULTIPLE and aligned.pays(weight, weight.shape)
        return aligned.product(x, weight, bias) if odd else F.linear(x, weight, bias)
    # With a recipe, the input is computed again and cast again in the backward: the cast for the weight gradient would
    # only take memory.
    if not needed or recipe_of(x) is not None:
        save_input(ctx, x, needed)
        return precision.product(x, weight, bias)
    # One pass over x makes both casts: rows for this product, and columns for the weight gradient. Only the second is
    # kept.
    y, x_t = precision.product_and_cast(x, weight, bias)
    save_cast(ctx, x_t)
    return y


def input_gradient(grad_y: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """``grad_y [..., out] x weight [out, in] -> [..., in]``, in ``grad_y``'s dtype; ``out`` as in :func:`product`."""
    if out is not None:
        return torch.mm(grad_y, readable(weight), out=out)
    state: ParameterState | None = getattr(weight, "megalight", None)
    if state is not None:
        precision: LowPrecision | None = state.precision
        if precision is not None:
            return precision.input_gradient(grad_y, weight)
        if state.stored is not None:
            weight = readable(weight)
    weight = weight if weight.dtype == grad_y.dtype else weight.to(grad_y.dtype)
    odd = (weight.shape[0] | weight.shape[1]) % aligned.MULTIPLE and aligned.pays(weight, weight.shape)
    return aligned.input_gradient(grad_y, weight) if odd else grad_y @ weight


def accumulate_weight_gradient(grad_y: Tensor, x: Tensor | Quantized, weight: Tensor) -> Tensor | None:
    """Compute the gradient ``grad_y^T x`` of ``weight [out, in]``, summed over all leading dims.

    Args:
        grad_y: ``[..., out]``.
        x: ``[..., in]``; may be cast already if ``weight`` has a precision.
        weight: if it has a main gradient, the gradient is added there (in float32 if that is float32, without a
            temporary of that size on CUDA), and ``mark_grad_ready()`` is called. Inside
            :func:`~megalight.ops.linear.weight_gradient.deferring`, both happen later.

    Returns:
        None if the gradient goes into the main gradient, else the gradient in the weight's dtype.
    """
    state: ParameterState | None = getattr(weight, "megalight", None)
    if state is not None:
        if state.main_grad is not None:
            if (queue := queue_for(weight)) is not None:
                held = x.detach() if isinstance(x, Tensor) else x  # a saved tensor would keep its autograd graph alive
                queue.put(weight, grad_y, lambda: lambda: held)
            else:
                weight_gradient.add_weight_gradient(weight, grad_y, x)
            return None
        precision: LowPrecision | None = state.precision
        if precision is not None:
            return precision.weight_gradient(grad_y, x, weight)
    assert isinstance(x, Tensor)
    grad_y = grad_y.reshape(-1, grad_y.shape[-1])
    # Under autocast, the saved input may still have its original dtype.
    x = x.reshape(-1, x.shape[-1]).to(grad_y.dtype)
    return (grad_y.T @ x).to(weight.dtype)


def accumulate_bias_gradient(grad_y: Tensor, bias: Tensor) -> Tensor | None:
    """Compute the gradient of ``bias [out]``: ``grad_y [..., out]`` summed over leading dims; returns as the above."""
    main_grad = main_grad_of(bias)
    grad_y = grad_y.reshape(-1, grad_y.shape[-1])
    if main_grad is None:
        return grad_y.sum(0).to(bias.dtype)
    state = state_of(bias)
    sum_rows(main_grad, grad_y, add=not state.touch())
    state.mark_grad_ready()
    return None


class _Linear(torch.autograd.Function):
    """A linear layer with a main gradient, a precision, or an input with a recipe.

    ``hidden`` is ``(weight, bias)`` in place of both arguments: see :func:`~megalight.ops.parameter.may_hide`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        hidden: tuple[Tensor, Tensor | None] | None,
    ) -> Tensor:
        # Parameters are kept by reference: a saved-tensor hook would return tensors without their state.
        if hidden is None:
            assert weight is not None
            ctx.needs = ctx.needs_input_grad[1:3]
        else:
            weight, bias = hidden
            ctx.needs = True, bias is not None
        ctx.weight, ctx.bias, ctx.x_dtype = weight, bias, x.dtype
        return product_and_save(ctx, x, weight, bias, ctx.needs[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        need_x, (need_weight, need_bias) = ctx.needs_input_grad[0], ctx.needs
        # The input gradient comes first: with deferred weight gradients it is all that the previous stage waits for.
        grad_x = input_gradient(grad_y, ctx.weight) if need_x else None
        if grad_x is not None and grad_x.dtype != ctx.x_dtype:
            grad_x = grad_x.to(ctx.x_dtype)
        grad_weight = accumulate_weight_gradient(grad_y, saved_input(ctx), ctx.weight) if need_weight else None
        grad_bias = accumulate_bias_gradient(grad_y, ctx.bias) if need_bias else None
        return grad_x, grad_weight, grad_bias, None
