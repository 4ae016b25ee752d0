"""Main gradients: where gradients of a parameter are summed over the passes of a step.

``parameter.main_grad`` has the parameter's shape, in a type of its own. Nobody sets it to zero between steps: once a
parameter is marked by :func:`begin`, the buffer holds anything, NaN too, and the first gradient that comes is written
over it without a look. Who brings gradients there therefore asks :func:`touch` each time, right before, and calls
``parameter.mark_grad_ready()`` after. A parameter that was never marked is only ever added to.
"""

from __future__ import annotations

from torch import Tensor

UNTOUCHED = "main_grad_untouched"


def begin(parameter: Tensor) -> None:
    """A step begins: the next gradient is to be written."""
    setattr(parameter, UNTOUCHED, True)


def untouched(parameter: Tensor) -> bool:
    """Whether none has come since :func:`begin`."""
    return UNTOUCHED in parameter.__dict__


def touch(parameter: Tensor) -> bool:
    """The same, and from now on one has: the caller brings it."""
    return bool(parameter.__dict__.pop(UNTOUCHED, False))


def put(target: Tensor, gradient: Tensor, write: bool) -> None:
    """Write ``gradient`` into ``target``, or add it."""
    if write:
        target.copy_(gradient)
    else:
        target.add_(gradient)


def add(parameter: Tensor, gradient: Tensor) -> None:
    """Bring one gradient, of the parameter's shape, to ``parameter.main_grad``."""
    put(parameter.main_grad, gradient, touch(parameter))  # type: ignore[attr-defined]
