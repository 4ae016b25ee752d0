"""Grouped products of torch: all groups at once, or a loop over the groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.grouped_linear.reference import groups
from megalight.ops.linear import wgrad


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, transposed: bool) -> Tensor:
    """Multiply each group with its weight, in one call."""
    # The library's kernel refuses zero rows.
    if not len(x):
        return x.new_empty(0, weight.shape[1 if transposed else 2])
    return F.grouped_mm(x, weight.mT if transposed else weight, offs=offsets)


def product(x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, transposed: bool) -> Tensor:
    """Multiply each group with its weight."""
    # Rows after the last group stay uninitialized: the contract allows any values there, and zeroing costs a pass.
    y = x.new_empty(len(x), weight.shape[1 if transposed else 2])
    factors = weight.mT if transposed else weight
    for expert, rows in groups(offsets, sizes):
        torch.mm(x[rows], factors[expert], out=y[rows])
    return y


def accumulate(
    main_grad: Tensor, grad_y: Tensor, x: Tensor, offsets: Tensor, sizes: Sequence[int] | None, write: bool
) -> None:
    """Add each group's ``grad_y^T x`` by the backend of dense layers, or write it."""
    add = wgrad.choose(wgrad.Spec(grad_y.device.type, grad_y.dtype, main_grad.dtype))
    for expert, rows in groups(offsets, sizes):
        if rows.start != rows.stop:
            add(main_grad[expert], grad_y[rows], x[rows], write)
        elif write:
            main_grad[expert].zero_()  # a library's product of zero rows may write nothing
