"""Arguments of a recorded module: static memory for each of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megalight.parallel.graphs.static import StaticInputs, tensors_of
from megalight.parallel.pipeline.carry import signature


@dataclass
class Leaf:
    """An argument that needs a gradient.

    Attributes:
        tensor: static memory, possibly that of the previous module's output; a leaf of the recorded autograd graph.
    """

    tensor: Tensor

    def fits(self, value: Any) -> bool:
        """Whether the recorded work accepts ``value``."""
        own = self.tensor
        return isinstance(value, Tensor) and (value.shape, value.dtype, value.requires_grad) == (
            own.shape,
            own.dtype,
            own.requires_grad,
        )

    def fill(self, value: Tensor) -> None:
        """Copy the value, unless it is in this memory already."""
        # The previous recorded module writes its output right here: then no copy is needed.
        if value.data_ptr() != self.tensor.data_ptr():
            self.tensor.detach().copy_(value.detach(), non_blocking=True)


class Held:
    """An argument without gradients: a tensor, or an object that holds tensors. Modules of one pass share it."""

    def __init__(self, value: Any) -> None:
        self.form: Hashable = signature(value)
        self.static = StaticInputs(value)
        self._note(value)

    @property
    def value(self) -> Any:
        """The value in static memory, as recorded work reads it."""
        return self.static.value

    def holds(self, value: Any) -> bool:
        """Whether ``value`` was copied last, and was not modified in place since."""
        return (
            self._source is value
            # These may get other tensors while they stay the same object.
            and not isinstance(value, dict | list)
            and all(tensor._version == version for tensor, version in self._versions)
        )

    def fits(self, value: Any) -> bool:
        """Whether the recorded work accepts ``value``."""
        return self.holds(value) or self.form == signature(value)

    def fill(self, value: Any) -> None:
        """Copy the value if it has changed."""
        if not self.holds(value):
            self.static.fill(value)
            self._note(value)

    def _note(self, value: Any) -> None:
        self._source = value
        self._versions = [(tensor, tensor._version) for tensor in tensors_of(value)]


@dataclass
class Constant:
    """An argument without tensors."""

    value: Any

    def fits(self, value: Any) -> bool:
        """Whether ``value`` equals the recorded one."""
        return type(value) is type(self.value) and bool(value == self.value)

    def fill(self, value: Any) -> None:
        """Nothing to do."""


Argument = Leaf | Held | Constant


def recordable(value: Any) -> str | None:
    """Return why an argument cannot be put into static memory; None: it can."""
    if isinstance(value, Tensor):
        return None
    if signature((value,)) is None:
        return f"an argument of type {type(value).__name__}, whose contents cannot be inspected"
    if any(tensor.requires_grad for tensor in tensors_of(value)):
        return f"an argument of type {type(value).__name__} that holds a tensor with a gradient"
    return None
