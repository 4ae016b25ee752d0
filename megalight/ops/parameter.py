"""State attached to a parameter: its main gradient, a callback for gradients, and the precision of its products.

The main gradient accumulates gradients over the passes of a step. It has the parameter's shape and a dtype of its own.
It is not zeroed between steps: while :attr:`ParameterState.untouched` is set, it holds arbitrary values, even NaN, and
the first gradient overwrites them. So an op that adds a gradient itself must call :meth:`ParameterState.touch` directly
before each one, and :attr:`ParameterState.mark_grad_ready` after it::

    state = state_of(weight)
    kernel(state.main_grad, grad_y, x, accumulate=not state.touch())
    state.mark_grad_ready()

:func:`add_gradient` does all of this for a gradient that exists as a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megalight.imports import has_grad_dtype

if TYPE_CHECKING:
    from megalight.ops.quantize.amax_history import AmaxHistory
    from megalight.ops.quantize.formats import Format


class WeightCast(ABC):
    """What casts a parameter for products in low precision.

    Attributes:
        history: magnitudes of past steps, for a recipe that scales by them; None: for others.
    """

    history: AmaxHistory | None

    @abstractmethod
    def forget(self) -> None:
        """Drop the cast of the parameter, because its values may change or go."""

    @abstractmethod
    def refresh(self, weight: Tensor) -> None:
        """Cast the parameter, once a step, into fixed memory, where recorded graphs read it."""

    @abstractmethod
    def release(self) -> None:
        """Free that memory; no graph reads it any more."""

    def storage_format(self, spared: bool) -> Format | None:
        """Return the 8-bit format in which the parameter itself is stored; None: it keeps its own dtype.

        Args:
            spared: whether quantized values would spare messages or memory: ranks gather the parameter after each step,
                or its masters are copies.
        """
        return None


def do_nothing() -> None:
    """Do nothing: the default callback."""


@dataclass(slots=True, eq=False)
class ParameterState:
    """All state attached to one parameter.

    It belongs to the parameter object. A copied or unpickled parameter has a fresh state.

    Attributes:
        main_grad: accumulates gradients; None: autograd keeps them in ``parameter.grad``. It is also available as
            ``parameter.main_grad``, where other packages look for it.
        untouched: a step has begun, and no gradient has arrived yet.
        unused: likewise, but over all passes of the step: buffers that no gradient reached are zeroed before.
        mark_grad_ready: call it after each gradient that an op has added to ``main_grad``.
        expect_late: call it when a gradient is put off that will be added after the backward pass.
        begin_late: call it before such a gradient is added, when ``main_grad`` may be lent to other parameters.
        grad_hook: the autograd hook that adds gradients of autograd to ``main_grad``.
        precision: precision of products with the parameter; None: its own dtype.
        stack_precision: the same for a stack of matrices ``[E, out, in]``.
        stored: quantized values of a frozen parameter (:mod:`megalight.ops.quantized_weight`); None: it holds its own.
        master_copy: the tensor is a separate copy that an optimizer updates instead of the model's parameter.
    """

    main_grad: Tensor | None = None
    untouched: bool = False
    unused: bool = False
    mark_grad_ready: Callable[[], None] = do_nothing
    expect_late: Callable[[], None] = do_nothing
    begin_late: Callable[[], None] = do_nothing
    grad_hook: RemovableHandle | None = None
    # Each belongs to one op, which alone knows its class: see `precision_of`, `stack_precision_of` and `stored_of`.
    precision: Any = None
    stack_precision: Any = None
    stored: Any = None
    master_copy: bool = False

    def touch(self) -> bool:
        """Return whether the next gradient must overwrite ``main_grad`` instead of adding; the caller then does it."""
        # Reading and clearing belong together: of several uses of a parameter in one step, only the first may
        # overwrite.
        first, self.untouched, self.unused = self.untouched, False, False
        return first

    def add(self, gradient: Tensor) -> None:
        """Write or add a gradient of the parameter's shape to ``main_grad``, without the callback."""
        assert self.main_grad is not None
        put(self.main_grad, gradient, self.touch())

    def __reduce__(self) -> tuple[Any, ...]:
        return ParameterState, ()


# Layers call these several times per pass, so each reads the attribute itself and saves a function call.


def state_of(parameter: Tensor) -> ParameterState:
    """Return the state of a parameter; create one if there is none."""
    state: ParameterState | None = getattr(parameter, "megalight", None)
    if state is None:
        state = parameter.megalight = ParameterState()  # type: ignore[attr-defined]
    return state


def known_state(parameter: Tensor | None) -> ParameterState | None:
    """Return the state of a parameter, or None."""
    state: ParameterState | None = getattr(parameter, "megalight", None)
    return state


def main_grad_of(parameter: Tensor | None) -> Tensor | None:
    """Return the main gradient of a parameter; None: autograd gets the gradient."""
    state: ParameterState | None = getattr(parameter, "megalight", None)
    return None if state is None else state.main_grad


def cast_of(parameter: Tensor) -> WeightCast | None:
    """Return what casts a parameter, be it a matrix or a stack of matrices."""
    state: ParameterState | None = getattr(parameter, "megalight", None)
    return None if state is None else state.precision or state.stack_precision


def storage_format_of(parameter: Tensor, spared: bool = False) -> Format | None:
    """Return the 8-bit format in which a parameter is stored; see :meth:`WeightCast.storage_format`."""
    cast = cast_of(parameter)
    return None if cast is None else cast.storage_format(spared)


def may_hide(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether a function of ``x`` and parameters may hide these from autograd, in a tuple.

    It may if its backward adds all of their gradients to main gradients. Autograd would visit each parameter in every
    backward pass all the same, find no gradient for it, and run its hook. ``x`` must require a gradient, or no backward
    would come. ``torch.compile`` does not look into tuples.
    """
    for parameter in parameters:
        if parameter is not None:
            state: ParameterState | None = getattr(parameter, "megalight", None)
            if state is None or state.main_grad is None or not parameter.requires_grad:
                return False
    return x.requires_grad and not torch.compiler.is_dynamo_compiling()


def collect(parameter: Tensor, main_grad: Tensor, ready: Callable[[], None] = do_nothing) -> ParameterState:
    """Let ops add the gradients of a parameter to ``main_grad`` from now on.

    A parameter has one main gradient at a time: an earlier one gets no further gradients.

    Args:
        main_grad: of the parameter's shape.
        ready: called after each gradient that an op has added there.
    """
    # An earlier hook would go on adding to the old main gradient.
    release(parameter)
    state = state_of(parameter)
    state.main_grad, state.mark_grad_ready = main_grad, ready
    parameter.main_grad = main_grad  # type: ignore[attr-defined]
    return state


def release(parameter: Tensor) -> None:
    """Give the gradients of a parameter back to autograd, and drop all references to the main gradient."""
    state = known_state(parameter)
    if state is None or state.main_grad is None:
        return
    if state.grad_hook is not None:
        state.grad_hook.remove()
    state.main_grad, state.untouched, state.grad_hook = None, False, None
    state.mark_grad_ready = state.expect_late = state.begin_late = do_nothing
    del parameter.main_grad  # type: ignore[attr-defined]
    # It may be a view of the main gradient, in that one's dtype.
    parameter.grad = None
    # Back to torch's rule. Buffers allow any dtype here, so that autograd can add to a wider gradient.
    if has_grad_dtype():
        parameter.grad_dtype = parameter.dtype


def put(target: Tensor, gradient: Tensor, write: bool) -> None:
    """Write ``gradient`` into ``target``, or add it."""
    if write:
        target.copy_(gradient)
    else:
        target.add_(gradient)


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add one gradient, of the parameter's shape, to its main gradient, and call the callback."""
    state = state_of(parameter)
    state.add(gradient)
    state.mark_grad_ready()
