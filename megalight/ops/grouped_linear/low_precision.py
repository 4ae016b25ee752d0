"""Grouped products in 8 or 4 bits: the matrices of each expert are cast on their own, as those of a linear layer.

The host must know the sizes of the groups, and waits for them if the caller does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megalight.ops.grouped_linear.reference import groups
from megalight.ops.linear.inputs import Saveable
from megalight.ops.linear.low_precision import LowPrecision
from megalight.ops.parameter import state_of


class SavedInputs:
    """The casts of an input, one per group; None for a group without rows. Autograd saves their tensors."""

    def __init__(self, casts: Sequence[Saveable | None]) -> None:
        self.tensors = tuple(tensor for cast in casts if cast is not None for tensor in cast.tensors)
        self._restore = [None if cast is None else (cast.restore, len(cast.tensors)) for cast in casts]

    @property
    def restore(self) -> Callable[..., list[Any]]:
        """A function that restores the casts from the saved tensors."""
        parts = self._restore

        def restored(*tensors: Tensor | None) -> list[Any]:
            left = iter(tensors)
            return [None if part is None else part[0](*islice(left, part[1])) for part in parts]

        return restored


def split(x: Tensor, offsets: Tensor, sizes: Sequence[int] | None) -> list[Tensor]:
    """Return the rows of each group of ``x [R, f]``.

    The backward pass must use one split of a gradient for both products: a precision notes its casts on the tensor that
    it gets, and would cast a new slice again, with other random numbers if it rounds stochastically.
    """
    return [x[rows] for _, rows in groups(offsets, sizes)]


def product(x: Sequence[Tensor], weight: Tensor, experts: Sequence[LowPrecision], rows: int) -> Tensor:
    """``x [R_e, in]`` of each group times ``weight [E, out, in]``: ``[rows, out]``; rows after the groups are unset."""
    y = weight.new_empty(rows, weight.shape[1], dtype=x[0].dtype)
    for expert, part, out in _filled(x, y):
        out.copy_(experts[expert].product(part, weight[expert], None))
    return y


def product_and_cast(
    x: Sequence[Tensor], weight: Tensor, experts: Sequence[LowPrecision], rows: int
) -> tuple[Tensor, SavedInputs]:
    """Return the product, and the casts of the input for the weight gradient."""
    y = weight.new_empty(rows, weight.shape[1], dtype=x[0].dtype)
    casts: list[Saveable | None] = [None] * len(experts)
    for expert, part, out in _filled(x, y):
        value, casts[expert] = experts[expert].product_and_cast(part, weight[expert], None)
        out.copy_(value)
    return y, SavedInputs(casts)


def input_gradient(grads: Sequence[Tensor], weight: Tensor, experts: Sequence[LowPrecision], rows: int) -> Tensor:
    """``grads [R_e, out]`` of each group times ``weight [E, out, in]``: ``[rows, in]``."""
    grad_x = weight.new_empty(rows, weight.shape[2], dtype=grads[0].dtype)
    for expert, part, out in _filled(grads, grad_x):
        out.copy_(experts[expert].input_gradient(part, weight[expert]))
    return grad_x


def weight_gradient(
    grads: Sequence[Tensor], x: Sequence[Any], weight: Tensor, experts: Sequence[LowPrecision]
) -> Tensor:
    """Return ``grad^T x`` of each group, ``[E, out, in]``, in the weight's dtype; ``x`` may be cast already."""
    out = torch.zeros_like(weight)
    for expert, (grad, own) in enumerate(zip(grads, x, strict=True)):
        if len(grad):
            out[expert] = experts[expert].weight_gradient(grad, own, weight.dtype)
    return out


def add_weight_gradient(
    weight: Tensor, grads: Sequence[Tensor], x: Sequence[Any], experts: Sequence[LowPrecision]
) -> None:
    """Add :func:`weight_gradient` to the main gradient of ``weight``, and report it."""
    state = state_of(weight)
    main_grad, write = state.main_grad, state.touch()
    assert main_grad is not None
    for expert, (grad, own) in enumerate(zip(grads, x, strict=True)):
        if len(grad):
            experts[expert].accumulate(main_grad[expert], grad, own, write)
        elif write:
            main_grad[expert].zero_()  # the memory holds anything when a step begins
    state.mark_grad_ready()


def _filled(parts: Sequence[Tensor], out: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """Return each group that has rows: its expert, its part, and its rows of ``out``.

    Groups without rows are left out: a cast of nothing has no magnitude, and products need a row.
    """
    found, start = [], 0
    for expert, part in enumerate(parts):
        if len(part):
            found.append((expert, part, out[start : start + len(part)]))
        start += len(part)
    return found
