"""Some rows of a matrix, and rows back in their places."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.common import apply, once_differentiable


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Copied, not added as torch does it: additions to rows that may be equal need atomics.
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.saved_tensors[0], grad), None


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of a matrix: ``x [T, h], rows [M] -> [M, h]``.

    Args:
        x: ``[T, h]``.
        rows: ``[M]`` int64, of which no two are equal. This is not checked: the host would have to wait.
    """
    out: Tensor = apply(_TakeRows, x, rows)
    return out


def put_rows(values: Tensor, rows: Tensor, size: int) -> Tensor:
    """Return a vector with values in the places ``rows``, and 0 elsewhere: ``values [M], rows [M] -> [size]``.

    Args:
        values: ``[M]``.
        rows: ``[M]`` int64, of which no two are equal.
        size: number of places.
    """
    return values.new_zeros(size).index_copy(0, rows, values)
