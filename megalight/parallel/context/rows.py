"""Selecting rows of a tensor, and putting them back. Each is the gradient of the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Return ``x[rows]``. All ``rows`` must be different: the gradient is a copy, where indexing would accumulate."""
    taken: Tensor = _Take.apply(x, rows)  # type: ignore[no-untyped-call]
    return taken


def put(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return a tensor of ``count`` rows with ``x`` at ``rows``, which must all be different, and 0 elsewhere."""
    whole: Tensor = _Put.apply(x, rows, count)  # type: ignore[no-untyped-call]
    return whole


def _put(x: Tensor, rows: Tensor, count: int) -> Tensor:
    shape = (count, *x.shape[1:])
    # A permutation writes every row, so zeros would be a wasted pass.
    return (x.new_empty(shape) if count == len(rows) else x.new_zeros(shape)).index_copy_(0, rows, x)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.rows, ctx.count = rows, len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _put(grads[0], ctx.rows, ctx.count), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, count: int) -> Tensor:
        ctx.rows = rows
        return _put(x, rows, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.rows), None, None
