"""Static inputs and outputs of CUDA graphs: nested values whose tensors keep their addresses."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megalight.parallel.pipeline.p2p_communication import signature

T = TypeVar("T")


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors of nested dicts, tuples, lists and dataclasses, in order."""
    return list(_tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif _is_record(value):
        for field in dataclasses.fields(value):
            if field.init:
                yield from _tensors(getattr(value, field.name))


def with_tensors(value: T, tensors: Iterator[Tensor]) -> T:
    """Return a value like ``value`` with other tensors, in the order of :func:`tensors_of`.

    Fields of a dataclass that are not arguments of its ``__init__``, and cached properties, are not copied.
    """
    changed: T = _with_tensors(value, tensors)
    return changed


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        items = {key: _with_tensors(item, tensors) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        parts = [_with_tensors(item, tensors) for item in value]
        return type(value)(parts) if type(value) in (tuple, list) else type(value)(*parts)  # a named tuple
    if _is_record(value):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _with_tensors(getattr(value, name), tensors) for name in names})
    return value


def clone(value: T) -> T:
    """Copy the tensors of a value, so that no replay overwrites them."""
    return with_tensors(value, iter([tensor.clone() for tensor in tensors_of(value)]))


class StaticInputs:
    """Static memory for inputs of one form.

    Attributes:
        value: the inputs, in static memory.
    """

    def __init__(self, value: Any) -> None:
        # Cloned, so that the address is ours: the caller's memory may be reused after the step.
        self.tensors = [tensor.detach().clone() for tensor in tensors_of(value)]
        self.value = with_tensors(value, iter(self.tensors))

    def fill(self, value: Any) -> None:
        """Copy in the tensors of another value of the same form, without waiting on the host."""
        if self.tensors:
            # One launch for all inputs.
            torch._foreach_copy_(self.tensors, tensors_of(value), non_blocking=True)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


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


class HeldArgument:
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
class StaticValue:
    """An argument without tensors."""

    value: Any

    def fits(self, value: Any) -> bool:
        """Whether ``value`` equals the recorded one."""
        return type(value) is type(self.value) and bool(value == self.value)

    def fill(self, value: Any) -> None:
        """Nothing to do."""


Argument = Leaf | HeldArgument | StaticValue


def recordable(value: Any) -> str | None:
    """Return why an argument cannot be put into static memory; None: it can."""
    if isinstance(value, Tensor):
        return None
    if signature((value,)) is None:
        return f"an argument of type {type(value).__name__}, whose contents cannot be inspected"
    if any(tensor.requires_grad for tensor in tensors_of(value)):
        return f"an argument of type {type(value).__name__} that holds a tensor with a gradient"
    return None
