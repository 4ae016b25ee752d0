"""Grouped GEMMs in 8 or 4 bits: all experts at once, or one after the other.

Each expert multiplies as a linear layer of its own would, in both ways.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from megalight.ops.autograd import Saveable
from megalight.ops.grouped_linear.backends import groups
from megalight.ops.linear.low_precision import LowPrecision
from megalight.ops.parameter import ParameterState, WeightCast, state_of
from megalight.ops.quantize.amax_history import AmaxHistory


class StackPrecision(WeightCast):
    """Products of a stack of weights ``[E, out, in]`` in low precision; the state of the stack refers to it.

    Attributes:
        history: the magnitudes of each weight, for ``delayed``.
        needs_sizes: whether the host must know the sizes of the groups.
    """

    history: AmaxHistory | None
    needs_sizes: ClassVar[bool] = False

    def wants_sizes(self, weight: Tensor) -> bool:
        """Return whether products of this stack are worth a wait of the host for the sizes of the groups."""
        return self.needs_sizes

    def way(self, weight: Tensor, sizes: Sequence[int] | None) -> StackPrecision:
        """Return what multiplies groups of these sizes, forward and backward."""
        return self

    @abstractmethod
    def product(
        self, x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, keep: bool
    ) -> tuple[Tensor, Saveable | None]:
        """Return ``[R, out]``, and with ``keep`` the input, cast for the weight gradient. Arguments: `grouped_linear`.

        Rows after the last group get any values.
        """

    @abstractmethod
    def gradients(self, grad_y: Tensor, offsets: Tensor, sizes: Sequence[int] | None) -> Any:
        """Return a gradient ``[R, out]`` in the form that the other methods take. All must get the same one."""

    @abstractmethod
    def input_gradient(self, grads: Any, weight: Tensor) -> Tensor:
        """Return ``[R, in]``."""

    @abstractmethod
    def accumulate(self, out: Tensor, grads: Any, x: Any, write: bool) -> None:
        """Add the weight gradient to ``out [E, out, in]``, or overwrite it; ``x`` may be restored from a cast."""


def stack_precision_of(parameter: Tensor) -> StackPrecision | None:
    """Return the precision of products with a stack of matrices; None: its own dtype."""
    state: ParameterState | None = getattr(parameter, "megalight", None)
    return None if state is None else state.stack_precision


def add_weight_gradient(weight: Tensor, precision: StackPrecision, grads: Any, x: Any) -> None:
    """Add the gradient to the main gradient of ``weight``, and report it."""
    state = state_of(weight)
    main_grad, write = state.main_grad, state.touch()
    assert main_grad is not None
    precision.accumulate(main_grad, grads, x, write)
    state.mark_grad_ready()


class OneByOne(StackPrecision):
    """Multiplies one expert after the other, by any precision of linear layers.

    The host must know the sizes of the groups, and waits for them if the caller does not.

    Args:
        experts: the precision of each expert.
        history: the history of the stack, of which each expert has a part.
    """

    needs_sizes = True

    def __init__(self, experts: Sequence[LowPrecision], history: AmaxHistory | None = None) -> None:
        self.experts = experts
        self.history = history

    def product(
        self, x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, keep: bool
    ) -> tuple[Tensor, Saveable | None]:
        """Multiply the rows of each expert; rows after the last are unset."""
        y = weight.new_empty(len(x), weight.shape[1], dtype=x.dtype)
        casts: list[Saveable | None] = [None] * len(self.experts)
        for expert, part, out in _filled(_split(x, offsets, sizes), y):
            if keep:
                value, casts[expert] = self.experts[expert].product_and_cast(part, weight[expert], None)
            else:
                value = self.experts[expert].product(part, weight[expert], None)
            out.copy_(value)
        return y, _GroupCasts(casts) if keep else None

    def gradients(self, grad_y: Tensor, offsets: Tensor, sizes: Sequence[int] | None) -> tuple[list[Tensor], int]:
        """Return the rows of each expert, and the number of all rows.

        A precision notes its casts on the tensor that it gets, and would cast a new slice again, with other random
        numbers if it rounds stochastically.
        """
        return _split(grad_y, offsets, sizes), len(grad_y)

    def input_gradient(self, grads: tuple[list[Tensor], int], weight: Tensor) -> Tensor:
        """Multiply the gradients of each expert."""
        parts, rows = grads
        grad_x = weight.new_empty(rows, weight.shape[2], dtype=parts[0].dtype)
        for expert, part, out in _filled(parts, grad_x):
            out.copy_(self.experts[expert].input_gradient(part, weight[expert]))
        return grad_x

    def accumulate(self, out: Tensor, grads: tuple[list[Tensor], int], x: Any, write: bool) -> None:
        """Add ``grad^T x`` of each expert."""
        if isinstance(x, Tensor):
            # By the sizes of the parts, so that the host need not wait again.
            sizes = list(map(len, grads[0]))
            x = torch.split(x, [*sizes, len(x) - sum(sizes)])[: len(sizes)]
        for expert, (grad, own) in enumerate(zip(grads[0], x, strict=True)):
            if len(grad):
                self.experts[expert].accumulate(out[expert], grad, own, write)
            elif write:
                out[expert].zero_()  # the memory holds anything when a step begins

    def forget(self) -> None:
        """Drop the cast of each expert."""
        for precision in self.experts:
            precision.forget()

    def refresh(self, weight: Tensor) -> None:
        """Cast the weight of each expert."""
        for precision, matrix in zip(self.experts, weight.detach(), strict=True):
            precision.refresh(matrix)

    def release(self) -> None:
        """Free the quantized values of each expert."""
        for precision in self.experts:
            precision.release()


class _GroupCasts:
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


def _split(x: Tensor, offsets: Tensor, sizes: Sequence[int] | None) -> list[Tensor]:
    """Return the rows of each group of ``x [R, f]``."""
    return [x[rows] for _, rows in groups(offsets, sizes)]


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
