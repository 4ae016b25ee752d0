"""``y + n B^T`` in place: the second product of a low-rank adapter adds to the output of its layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.batch_invariant import refuse
from megalight.ops.linear import WGRAD, WeightGradientSpec
from megalight.ops.parameter import main_grad_of, state_of
from megalight.registry import choose


def add_low_rank(y: Tensor, narrow: Tensor, up: Tensor, sizes: Sequence[int], adapted: Sequence[bool]) -> Tensor:
    """Add ``narrow[..., i r : (i + 1) r] B_i^T`` to the ``i``-th adapted section of ``y``, and return ``y``.

    The products add to ``y`` themselves: it is read and written once, and no tensor of its size is made.

    Args:
        y: ``[..., out]``, the output of a layer; it is overwritten.
        narrow: ``[..., n r]`` for ``n`` adapted sections.
        up: all ``B_i``, ``[output features of the adapted sections, r]``. If it has a main gradient
            (:mod:`megalight.ops.parameter`), its gradient is added there, and autograd gets None.
        sizes: output features of each section of the layer.
        adapted: for each section, whether it is adapted.
    """
    refuse("adapters (merge them: megalight merge)")
    out: Tensor = apply(_AddLowRank, y, narrow, up, tuple(sizes), tuple(adapted))
    return out


class _AddLowRank(torch.autograd.Function):
    """Adds in place; the gradient of ``y`` passes through."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, narrow: Tensor, up: Tensor, sizes: tuple[int, ...], adapted: tuple[bool, ...]
    ) -> Tensor:
        # The parameter is kept by reference: a saved-tensor hook would return one without its state.
        ctx.up, ctx.parts, ctx.shape, ctx.dtype = (
            up,
            list(_parts(sizes, adapted, up.shape[1])),
            narrow.shape,
            narrow.dtype,
        )
        # Under autocast, the output of a layer may have fewer bits than its adapter.
        narrow = narrow.reshape(-1, narrow.shape[-1]).to(y.dtype)
        ctx.save_for_backward(narrow)
        # An alias, and not `mark_dirty`, which refuses views, as GEMMs in 8 bits may return. Autograd still raises
        # if `y` was saved.
        out = y.detach()
        rows, factor = out.view(-1, out.shape[-1]), up.to(y.dtype)
        for features, few, own in ctx.parts:
            rows[:, features].addmm_(narrow[:, few], factor[own].t())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (narrow,) = ctx.saved_tensors
        up, (_, need_narrow, need_up, *_) = ctx.up, ctx.needs_input_grad
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        grad_narrow = grad_up = None
        if need_narrow:
            factor = up.to(rows.dtype)
            grad_narrow = torch.empty_like(narrow)
            for features, few, own in ctx.parts:
                torch.mm(rows[:, features], factor[own], out=grad_narrow[:, few])
            grad_narrow = grad_narrow.view(ctx.shape).to(ctx.dtype)
        if need_up:
            grad_up = _up_gradient(rows, narrow, up, ctx.parts)
        return grad_y, grad_narrow, grad_up, None, None


def _up_gradient(rows: Tensor, narrow: Tensor, up: Tensor, parts: list[tuple[slice, slice, slice]]) -> Tensor | None:
    """Return the gradient of ``up``; None if it has been added to the main gradient."""
    main_grad = main_grad_of(up)
    if main_grad is None:
        return torch.cat([rows[:, features].t() @ narrow[:, few] for features, few, _ in parts]).to(up.dtype)
    state = state_of(up)
    write = state.touch()
    accumulate = choose(WGRAD, WeightGradientSpec(rows.device.type, rows.dtype, main_grad.dtype))
    for features, few, own in parts:
        accumulate(main_grad[own], rows[:, features], narrow[:, few], write)
    state.mark_grad_ready()
    return None


def _parts(sizes: Sequence[int], adapted: Sequence[bool], width: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the columns of each adapted section in ``y``, its columns in ``narrow``, and its rows in ``up``."""
    start = row = column = 0
    for size, chosen in zip(sizes, adapted, strict=True):
        if chosen:
            yield slice(start, start + size), slice(column, column + width), slice(row, row + size)
            row, column = row + size, column + width
        start += size
