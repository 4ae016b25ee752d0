"""Products with weights whose rows the fast kernels of a GPU do not read.

Hopper's kernels read matrices whose rows begin at multiples of 16 bytes: 8 elements in half precision. For others, such
as the 3,420 features in the tower of Qwen2.5-VL, libraries take kernels of older GPUs, at a third of the rate. Copies
with zeros at the ends of rows cost less: they take as long as the memory needs, and the product has the fast kernel.

The results are the same: zeros add nothing to a sum, and rows and columns of zeros are cut off again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.linear.measured import Accumulate
from megalight.ops.parameter import put

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
    y = F.linear(filled(x), _filled_weight(weight), bias)
    return y[..., :rows].contiguous() if short else y


def input_gradient(grad_y: Tensor, weight: Tensor) -> Tensor:
    """``grad_y [..., out]`` times ``weight [out, in]``: ``[..., in]``."""
    columns = weight.shape[1]
    grad_x = filled(grad_y) @ _filled_weight(weight)
    return grad_x[..., :columns].contiguous() if columns % MULTIPLE else grad_x


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


def filled(x: Tensor) -> Tensor:
    """``[..., n]`` with zeros up to a multiple of columns; the same tensor, if there are as many."""
    columns = x.shape[-1]
    if not columns % MULTIPLE:
        return x
    if x.requires_grad and torch.is_grad_enabled():
        return F.pad(x, (0, -columns % MULTIPLE))
    out = x.new_empty(*x.shape[:-1], columns + -columns % MULTIPLE)
    source, target = x, out
    per_word = 8 // x.element_size()
    if x.is_contiguous() and per_word and not columns % per_word and not x.data_ptr() % 8:
        # A copy between rows of different lengths is made element by element: of larger elements it is faster.
        source, target = x.view(torch.int64), out.view(torch.int64)
    target[..., : source.shape[-1]].copy_(source)
    out[..., columns:].zero_()
    return out


def _filled_weight(weight: Tensor) -> Tensor:
    """``[out, in]`` with zeros up to multiples of rows and columns."""
    short = -weight.shape[0] % MULTIPLE
    weight = filled(weight)
    return F.pad(weight, (0, 0, 0, short)) if short else weight
