"""``y = x W_e^T`` for rows grouped by expert ``e``, with weight gradients accumulated in the main gradient.

The sizes of groups stay on the device, as offsets: nothing here waits for it, unless a backend needs them on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.ops.autograd import apply, once_differentiable, recipe_of, save_cast, save_input, saved_input
from megalight.ops.batch_invariant import MODE, refuse
from megalight.ops.batch_invariant.matmul import grouped_product
from megalight.ops.grouped_linear import few_rows, low_precision
from megalight.ops.grouped_linear.backends import EXAMPLE, PRODUCT, WGRAD, GroupedLinearSpec
from megalight.ops.grouped_linear.low_precision import stack_precision_of
from megalight.ops.linear import queue_for, reads_fp8
from megalight.ops.parameter import main_grad_of, state_of
from megalight.ops.quantized_weight import readable, stored_of
from megalight.registry import BackendRegistry, choose

__all__ = [
    "EXAMPLE",
    "PRODUCT",
    "REGISTRIES",
    "WGRAD",
    "GroupedLinearSpec",
    "grouped_bias",
    "grouped_linear",
    "grouped_scale",
]

REGISTRIES: tuple[BackendRegistry[GroupedLinearSpec, Any], ...] = (PRODUCT, WGRAD)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    sizes: Sequence[int] | None = None,
    backend: str = "auto",
    *,
    input_first: bool = False,
) -> Tensor:
    """``[R, in] x [E, out, in] -> [R, out]``: group ``e``, rows ``offsets[e - 1]`` to ``offsets[e]``, times ``W_e^T``.

    Rows after the last group get any values; nothing may read them. An expert without rows gets a gradient of zeros.

    If the weight has a main gradient (:mod:`megalight.ops.parameter`), its gradient is added there, in float32 if that
    is float32, and autograd gets None. If ``x`` has a recipe (:mod:`megalight.ops.autograd`), only the recipe is
    kept. A quantized stack (:mod:`megalight.ops.quantized_weight`) is dequantized for each GEMM, but for few
    rows of e4m3. If the stack has a
    precision (:mod:`megalight.ops.grouped_linear.low_precision`), its GEMMs use that.

    Args:
        x: ``[R, in]``, rows grouped by expert.
        weight: ``[E, out, in]``; cast to the dtype of ``x`` if need be.
        offsets: ``[E]`` int32 on the device, the end of each group.
        sizes: the sizes of the groups on the host, if they are known there. The sum may be less than ``R``.
        backend: backend of the products. ``auto`` is also that of the weight gradient.
        input_first: the weight is ``[E, in, out]`` instead, as some families of ``transformers`` have it.

    Raises:
        ConfigurationError: a stack ``[E, in, out]`` has a precision.
    """
    # Custom autograd functions are not on autocast's list, so the cast is ours. The weight follows in `_product`.
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    # Evaluation: no graph, and no note of the input is needed.
    precision = stack_precision_of(weight)
    if MODE.on and precision is not None:
        refuse("grouped products in 8 or 4 bits")
    if input_first and precision is not None:
        raise ConfigurationError("experts with weights [E, in, out] are not served in 8 or 4 bits; use bf16 for them.")
    if not torch.is_grad_enabled():
        if precision is not None:
            return precision.way(weight, sizes).product(x, weight, offsets, sizes, keep=False)[0]
        return _product(x, weight, offsets, sizes, not input_first, backend)
    known = None if sizes is None else tuple(sizes)
    out: Tensor
    if precision is None:
        out = apply(_GroupedLinear, x, weight, offsets, known, backend, input_first)
    else:
        out = apply(_LowPrecisionGroupedLinear, x, weight, offsets, known, backend)
    return out


def grouped_bias(
    y: Tensor, bias: Tensor, offsets: Tensor, weights: Tensor | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """Add each group's bias: ``y [R, out] + bias[e]``, or ``+ weights[r] bias[e]`` with ``weights [R]``.

    Rows after the last group become zeros, and their gradients are not read. ``sizes`` and all else are those of
    :func:`grouped_linear`.
    """
    refuse("experts with biases")
    chosen, inside = _rows_of(offsets, y, len(bias), sizes)
    if weights is not None:
        chosen = chosen * weights.to(y.dtype).unsqueeze(-1)
    out = torch.addmm(y, chosen, bias.to(y.dtype))
    # Rows after the last group hold anything, even NaN, and so do their gradients. In the product that is the gradient
    # of the bias, NaN times zero would reach the biases of all experts.
    return out if inside is None else torch.where(inside, out, 0)


def grouped_scale(y: Tensor, factors: Tensor, offsets: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
    """Multiply each group's rows by the group's own factors: ``y [R, out] * factors[e]``, with ``factors [E, out]``.

    Rows after the last group become zeros, and their gradients are not read. ``sizes`` and all else are those of
    :func:`grouped_linear`.
    """
    chosen, inside = _rows_of(offsets, y, len(factors), sizes)
    by_row = chosen @ factors.to(y.dtype)
    if inside is None:
        return y * by_row
    # Before the product too: its gradient multiplies by these rows, which may be NaN.
    return torch.where(inside, torch.where(inside, y, 0) * by_row, 0)


def _rows_of(offsets: Tensor, y: Tensor, count: int, sizes: Sequence[int] | None) -> tuple[Tensor, Tensor | None]:
    """Return which group each row of ``y`` is in, as one-hot rows ``[R, E]``, and which rows are in any, ``[R, 1]``.

    The product with one-hot rows has a product as gradient: it is always summed in the same order. None: all rows are
    known to be in a group.
    """
    row = torch.arange(len(y), dtype=offsets.dtype, device=y.device)
    group = torch.searchsorted(offsets, row, right=True)
    chosen = (group.unsqueeze(1) == torch.arange(count, device=y.device)).to(y.dtype)
    full = sizes is not None and sum(sizes) == len(y)
    return chosen, None if full else (group < count).unsqueeze(1)


def _product(
    x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, transposed: bool, backend: str
) -> Tensor:
    stored = stored_of(weight)
    if transposed and stored is not None and len(x) <= few_rows.MEAN * len(weight) and reads_fp8(x, weight, stored):
        return few_rows.few_rows_product(x, weight, offsets)
    weight = readable(weight).to(x.dtype)
    if MODE.on and transposed:
        return grouped_product(x, weight, offsets)
    out: Tensor = choose(PRODUCT, GroupedLinearSpec.of(x, weight, sizes), backend)(
        x, weight, offsets, sizes, transposed
    )
    return out


def add_weight_gradient(
    weight: Tensor, grad_y: Tensor, x: Tensor, offsets: Tensor, sizes: Sequence[int] | None = None
) -> None:
    """Add each group's ``grad_y^T x`` to the main gradient of ``weight [E, out, in]``, and report it.

    The first gradient of a step overwrites: see :mod:`megalight.ops.parameter`.
    """
    state = state_of(weight)
    main_grad, write = state.main_grad, state.touch()
    assert main_grad is not None
    choose(WGRAD, GroupedLinearSpec.of(x, main_grad, sizes))(main_grad, grad_y, x, offsets, sizes, write)
    state.mark_grad_ready()


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        offsets: Tensor,
        sizes: tuple[int, ...] | None,
        backend: str,
        input_first: bool = False,
    ) -> Tensor:
        # The parameter is kept by reference: a saved-tensor hook would return a tensor without its state.
        ctx.weight, ctx.offsets, ctx.sizes, ctx.backend, ctx.input_first = weight, offsets, sizes, backend, input_first
        save_input(ctx, x, ctx.needs_input_grad[1])
        return _product(x, weight, offsets, sizes, not input_first, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        weight, offsets, sizes = ctx.weight, ctx.offsets, ctx.sizes
        need_x, need_weight, *_ = ctx.needs_input_grad
        # A gradient of a sum is an expanded scalar with strides of 0, which TMA and grouped GEMMs cannot read.
        grad_y = grad_y.contiguous()
        # The input gradient first: what comes before this layer in the backward depends on it alone.
        grad_x = _product(grad_y, weight, offsets, sizes, ctx.input_first, ctx.backend) if need_x else None
        if not need_weight:
            return grad_x, None, None, None, None, None
        x = saved_input(ctx)
        assert isinstance(x, Tensor)
        if ctx.input_first:
            # The gradient of a weight `[in, out]` is that of `[out, in]` with both in each other's place.
            grad_y, x = x.to(grad_y.dtype), grad_y
        if main_grad_of(weight) is None:
            # `empty` is safe: with write=True, experts without rows are written too (zeros).
            grad_weight = torch.empty_like(weight)
            choose(WGRAD, GroupedLinearSpec.of(x, weight, sizes))(grad_weight, grad_y, x, offsets, sizes, True)
            return grad_x, grad_weight, None, None, None, None
        if (queue := queue_for(weight)) is not None:
            held = x.detach()  # a saved tensor would keep its autograd graph alive
            queue.put(weight, grad_y, lambda: lambda: held, partial(add_weight_gradient, offsets=offsets, sizes=sizes))
        else:
            add_weight_gradient(weight, grad_y, x, offsets, sizes)
        return grad_x, None, None, None, None, None


class _LowPrecisionGroupedLinear(torch.autograd.Function):
    """Grouped GEMMs by the precision of the stack."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, sizes: tuple[int, ...] | None, backend: str
    ) -> Tensor:
        precision = stack_precision_of(weight)
        assert precision is not None
        # Chosen once: the backward reads the casts of this way.
        precision = precision.way(weight, sizes)
        if sizes is None and precision.needs_sizes:
            # Here, and not in the precision: the backward need not wait again.
            sizes = tuple(offsets.diff(prepend=offsets.new_zeros(1)).tolist())
        ctx.weight, ctx.precision, ctx.offsets, ctx.sizes = weight, precision, offsets, sizes
        needed = ctx.needs_input_grad[1]
        # As for dense layers: a recipe takes less memory than quantized values, and is cast again in the backward.
        keep = needed and recipe_of(x) is None
        y, kept = precision.product(x, weight, offsets, sizes, keep)
        if kept is None:
            save_input(ctx, x, needed)
        else:
            save_cast(ctx, kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        weight, precision = ctx.weight, ctx.precision
        need_x, need_weight, *_ = ctx.needs_input_grad
        grads = precision.gradients(grad_y.contiguous(), ctx.offsets, ctx.sizes)
        grad_x = precision.input_gradient(grads, weight) if need_x else None
        if not need_weight:
            return grad_x, None, None, None, None
        x = saved_input(ctx)
        x = x.detach() if isinstance(x, Tensor) else x  # a saved tensor would keep its autograd graph alive
        if main_grad_of(weight) is None:
            # `empty` is safe: with write=True, experts without rows are written too (zeros).
            grad_weight = torch.empty_like(weight)
            precision.accumulate(grad_weight, grads, x, True)
            return grad_x, grad_weight, None, None, None
        if (queue := queue_for(weight)) is not None:
            # The casts, not the gradient, so that the second product uses those of the first.
            queue.put(
                weight,
                grad_y,
                lambda: lambda: x,
                lambda weight, _, x: low_precision.add_weight_gradient(weight, precision, grads, x),
            )
        else:
            low_precision.add_weight_gradient(weight, precision, grads, x)
        return grad_x, None, None, None, None
