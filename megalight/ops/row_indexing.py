"""Row indexing: some rows of a matrix, rows back in their places, and splits whose gradients need no concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable


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


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    return a.data_ptr() == b.data_ptr() and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat(parts, -1)``; a view of them where they are neighboring columns of the same rows in memory.

    The gradient of rows that were divided is a concatenation of the parts' gradients, which copies all of them.
    There are two ways to avoid the copy. An op that computes the gradients of all parts writes them into one
    tensor, which :func:`joined` finds. An op that computes the gradient of one part asks :func:`place_of` where to
    write it.
    """
    first, sizes = parts[0], [part.shape[-1] for part in parts]
    # Rows that lie closer together than they are wide are not rows of one matrix.
    if first.ndim == 2 and first.stride(1) == 1 and first.stride(0) >= sum(sizes):
        end = first.storage_offset() + (len(first) - 1) * first.stride(0) + sum(sizes)
        if len(first) and end * first.element_size() <= first.untyped_storage().nbytes():
            whole = first.as_strided((len(first), sum(sizes)), first.stride())
            if all(_same(part, place) for part, place in zip(parts, torch.split(whole, sizes, -1), strict=True)):
                return whole
    return torch.cat(list(parts), -1)


class Places:
    """Memory for the gradients of all parts of some rows, side by side. It is made when the first one is wanted.

    Args:
        rows: the rows ``[T, n]`` that were divided.
        sizes: columns of the parts.
    """

    def __init__(self, rows: Tensor, sizes: Sequence[int]) -> None:
        self.shape, self.dtype, self.device = rows.shape, rows.dtype, rows.device
        self.sizes = list(sizes)
        self.given: dict[int, Tensor] = {}
        self.memory: Tensor | None = None

    def take(self, index: int) -> Tensor | None:
        """Return the place of a part's gradient, to be written; None if another op has it."""
        if index in self.given:
            return None
        if self.memory is None:
            self.memory = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        begin = list(accumulate(self.sizes, initial=0))[index]
        self.given[index] = self.memory[:, begin : begin + self.sizes[index]]
        return self.given[index]

    def join(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the gradients, joined, and give the memory up."""
        memory, given = self.memory, self.given
        self.memory, self.given = None, {}
        # A place that does not hold the gradient of its part belongs to whoever asked for it.
        if memory is None or not all(_same(grads[index], place) for index, place in given.items()):
            return joined(grads)
        for index, part in enumerate(torch.split(memory, self.sizes, -1)):
            if index not in given:
                part.copy_(grads[index])
        return memory


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Places) -> tuple[Tensor, ...]:
        ctx.places = places
        return torch.split(rows, places.sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Gradients of gradients are wanted if gradients are enabled here: memory that ops wrote to has none.
        return torch.cat(grads, -1) if torch.is_grad_enabled() else ctx.places.join(grads), None


def split(rows: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """``torch.split(rows, sizes, -1)`` of ``rows [T, n]``, with views that are not to be written to."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return torch.split(rows, list(sizes), -1)
    parts: tuple[Tensor, ...] = apply(_Parts, rows, Places(rows, sizes))
    return parts


def place_of(part: Tensor) -> tuple[Places, int] | None:
    """Return where the gradient of a part belongs, for :func:`empty_gradient`; None of other tensors."""
    # The context of a function is the node of its outputs in autograd's graph, so a part needs no mark.
    places = getattr(part.grad_fn, "places", None)
    return (places, part.output_nr) if isinstance(places, Places) else None


def empty_gradient(part: Tensor, place: tuple[Places, int] | None) -> Tensor:
    """Return memory ``[T, n]`` for the gradient of a part, beside that of its neighbors if these have such memory.

    The op that calls this in its backward writes all of it, and returns it as the gradient.
    """
    found = None if place is None else place[0].take(place[1])
    return torch.empty(part.shape, dtype=part.dtype, device=part.device) if found is None else found
