"""Inputs and results of recorded work: nested values whose tensors keep their addresses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

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
