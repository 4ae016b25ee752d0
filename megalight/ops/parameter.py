"""What is kept beside a parameter: its main gradient, who hears of gradients, and how its products are formed.

The main gradient is where gradients are summed over the passes of a step. It has the parameter's shape and a type of
its own. Nobody sets it to zero between steps: while :attr:`ParameterState.untouched` is set, it holds anything, NaN
too, and the first gradient that comes is written over it. An op that brings a gradient there itself therefore asks
:meth:`ParameterState.touch` right before, each time, and calls :attr:`ParameterState.mark_grad_ready` after::

    state = state_of(weight)
    kernel(state.main_grad, grad_y, x, accumulate=not state.touch())
    state.mark_grad_ready()

:func:`add_gradient` does all of it for a gradient that exists as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megalight.imports import has_grad_dtype

if TYPE_CHECKING:
    from megalight.ops.linear.low_precision import LowPrecision


def nobody() -> None:
    """Listens to no gradient."""


@dataclass(slots=True, eq=False)
class ParameterState:
    """All that is attached to one parameter.

    It belongs to the parameter object: a copy or a pickle of the parameter begins without any.

    Attributes:
        main_grad: where gradients are summed; None: autograd keeps them in ``parameter.grad``. It can also be read as
            ``parameter.main_grad``, where packages look for it.
        untouched: a step began and no gradient has come yet.
        mark_grad_ready: to be called after each gradient that an op brought to ``main_grad``.
        landing: autograd's hook that brings its gradients to ``main_grad``.
        precision: how products with the parameter are formed; None: in its own type.
        master_copy: an optimizer updates it in place of the parameter that the model computes with.
    """

    main_grad: Tensor | None = None
    untouched: bool = False
    mark_grad_ready: Callable[[], None] = nobody
    landing: RemovableHandle | None = None
    precision: LowPrecision | None = None
    master_copy: bool = False

    def touch(self) -> bool:
        """Whether the next gradient is to be written over ``main_grad``, not added: the caller brings it."""
        first, self.untouched = self.untouched, False
        return first

    def add(self, gradient: Tensor) -> None:
        """Write or add a gradient of the parameter's shape to ``main_grad``, without telling anybody."""
        assert self.main_grad is not None
        put(self.main_grad, gradient, self.touch())

    def __reduce__(self) -> tuple[Any, ...]:
        return ParameterState, ()


# Layers ask these several times per pass: each asks the tensor itself, for a call less.


def state_of(parameter: Tensor) -> ParameterState:
    """The state of a parameter; a new one where it had none."""
    state: ParameterState | None = getattr(parameter, "megalight", None)
    if state is None:
        state = parameter.megalight = ParameterState()  # type: ignore[attr-defined]
    return state


def known_state(parameter: Tensor | None) -> ParameterState | None:
    """The state of a parameter, if it has one."""
    state: ParameterState | None = getattr(parameter, "megalight", None)
    return state


def main_grad_of(parameter: Tensor | None) -> Tensor | None:
    """Where the gradient of a parameter is to be added; None: autograd gets it."""
    state: ParameterState | None = getattr(parameter, "megalight", None)
    return None if state is None else state.main_grad


def precision_of(parameter: Tensor) -> LowPrecision | None:
    """How products with a parameter are formed; None: in its own type."""
    state: ParameterState | None = getattr(parameter, "megalight", None)
    return None if state is None else state.precision


def collect(parameter: Tensor, main_grad: Tensor, ready: Callable[[], None] = nobody) -> ParameterState:
    """Have ops bring the gradients of a parameter to ``main_grad`` from now on.

    One place collects at a time: whoever collected before hears of no further gradient.

    Args:
        main_grad: of the parameter's shape.
        ready: called after each gradient that an op brought there.
    """
    release(parameter)
    state = state_of(parameter)
    state.main_grad, state.mark_grad_ready = main_grad, ready
    parameter.main_grad = main_grad  # type: ignore[attr-defined]
    return state


def release(parameter: Tensor) -> None:
    """Leave the gradients of a parameter to autograd again. Nothing refers to the main gradient afterwards."""
    state = known_state(parameter)
    if state is None or state.main_grad is None:
        return
    if state.landing is not None:
        state.landing.remove()
    state.main_grad, state.untouched, state.mark_grad_ready, state.landing = None, False, nobody, None
    del parameter.main_grad  # type: ignore[attr-defined]
    parameter.grad = None
    if has_grad_dtype():
        parameter.grad_dtype = parameter.dtype


def put(target: Tensor, gradient: Tensor, write: bool) -> None:
    """Write ``gradient`` into ``target``, or add it."""
    if write:
        target.copy_(gradient)
    else:
        target.add_(gradient)


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Bring one gradient, of the parameter's shape, to its main gradient, and say so."""
    state = state_of(parameter)
    state.add(gradient)
    state.mark_grad_ready()
