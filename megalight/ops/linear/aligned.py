"""Products with weights whose rows the fast kernels of a GPU do not read.

Hopper's kernels read matrices whose rows begin at multiples of 16 bytes: 8 elements in half precision. For others, such
as the 3,420 features in the tower of Qwen2.5-VL, libraries take kernels of older GPUs, at a third of the rate. Copies
with zeros at the ends of rows cost less: they take as long as the memory needs, and the product has the fast kernel.

The results are the same: zeros add nothing to a sum, and rows and columns of zeros are cut off again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.parameter import put

Accumulate: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], None]
"""``(main_grad [out, in], grad_y [T, out], x [T, in], write)``: adds in place, or overwrites."""

MULTIPLE = 8
"""Elements of half precision in 16 bytes."""
SMALLEST = 256
"""Features from which a product takes longer than its copies."""


def pays(operand: Tensor, shape: torch.Size) -> bool:
    """Return whether copies pay for products of ``operand`` and a weight of ``shape``, of which a side is odd."""
    return operand.is_cuda and operand.element_size() == 2 and min(shape) >= SMALLEST


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [..., in]`` times ``weight [out, in]``, and ``bias [out]``: ``[..., out]``; differentiable."""
    rows = weight.shape[0]
    short = -rows % MULTIPLE
    if short and bias is not None:
        bias = F.pad(bias, (0, short))
    y = F.linear(filled(x), filled(weight, rows=True), bias)
    return cut(y, rows) if short else y


def input_gradient(grad_y: Tensor, weight: Tensor) -> Tensor:
    """``grad_y [..., out]`` times ``weight [out, in]``: ``[..., in]``."""
    return cut(filled(grad_y) @ filled(weight, rows=True), weight.shape[1])


def add_weight_gradient(accumulate: Accumulate, main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    """Add ``grad_y^T x`` to ``main_grad [out, in]``, or write it there.

    Args:
        accumulate: does so where sides are multiples.
        main_grad: the gradient so far.
        grad_y: ``[T, out]``.
        x: ``[T, in]``.
        write: overwrite what is there.
    """
    rows, columns = main_grad.shape
    whole = main_grad.new_empty(rows + -rows % MULTIPLE, columns + -columns % MULTIPLE)
    accumulate(whole, filled(grad_y), filled(x), True)
    put(main_grad, whole[:rows, :columns], write)


def filled(x: Tensor, rows: bool = False, multiple: int = MULTIPLE) -> Tensor:
    """``[..., n]`` with zeros up to a multiple of columns and, on demand, of rows; the same tensor if there are none.

    Where a gradient will be needed, autograd sees it.
    """
    count, columns = x.shape[-2] if rows else 0, x.shape[-1]
    below, beside = -count % multiple, -columns % multiple
    if not below and not beside:
        return x
    if x.requires_grad and torch.is_grad_enabled():
        return F.pad(x, (0, beside, 0, below) if rows else (0, beside))
    shape = list(x.shape)
    shape[-1] += beside
    if below:
        shape[-2] += below
    out = x.new_empty(shape)
    _copy(x, out[..., :count, :] if below else out, columns)
    if beside:
        out[..., columns:].zero_()
    if below:
        out[..., count:, :].zero_()
    return out


def cut(x: Tensor, columns: int) -> Tensor:
    """Return the first columns of ``[..., n]``, as rows without gaps; the same tensor if there are no more."""
    if x.shape[-1] == columns:
        return x
    if x.requires_grad and torch.is_grad_enabled():
        return x[..., :columns].contiguous()
    out = x.new_empty(*x.shape[:-1], columns)
    _copy(x, out, columns)
    return out


def _copy(source: Tensor, target: Tensor, columns: int) -> None:
    """Copy the first columns of rows of one length to rows of another one."""
    # Elements are copied one by one: of 8 bytes, in 0.4 of the time of 2 bytes (H200).
    each = max(1, 8 // source.element_size())
    if not columns % each and _has_words(source, each) and _has_words(target, each):
        source, target, columns = source.view(torch.int64), target.view(torch.int64), columns // each
    target[..., :columns].copy_(source[..., :columns])


def _has_words(x: Tensor, each: int) -> bool:
    return x.is_contiguous() and not x.shape[-1] % each and not x.data_ptr() % 8
