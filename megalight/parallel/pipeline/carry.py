"""The carry: named tensors that travel between stages, and their form (names, shapes, dtypes)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.types import Opaque

Carry: TypeAlias = dict[str, Tensor]


class CarryEntry(NamedTuple):
    """One tensor of a carry, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def buffer(self, device: torch.device) -> Tensor:
        """Allocate a tensor for the values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        wants = " with a gradient" if self.requires_grad else ""
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}{wants}"


Form: TypeAlias = tuple[CarryEntry, ...]
"""A carry without its values."""


class Forms:
    """A cache of forms on one end of a channel.

    Both ends see the same messages in the same order, so they store and drop the same forms.
    """

    def __init__(self, most: int = 1024) -> None:
        self.most = most
        self._known: dict[Hashable, Form] = {}

    def get(self, key: Hashable | None) -> Form | None:
        """Return the form stored under ``key``, or None."""
        return None if key is None else self._known.get(key)

    def put(self, key: Hashable | None, form: Form) -> None:
        """Store a form; drop the oldest one if there are too many. Without a key, nothing is stored."""
        if key is not None:
            # A dict drops its oldest entry first, on both ends alike, as both have stored in the same order.
            self._known[key] = form
            if len(self._known) > self.most:
                del self._known[next(iter(self._known))]


def form_of(carry: Mapping[str, Tensor]) -> Form:
    """Return the form of a carry, which its receiver must know in advance."""
    return tuple(CarryEntry(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in carry.items())


def check_carry(carry: Any, where: str) -> Carry:
    """Check that a carry is a dict of tensors by name, and return it.

    Raises:
        TypeError: it is not.
    """
    step = "it must return a dict of tensors (hidden states for the next chunk, or what loss_step reads)."
    if not isinstance(carry, dict):
        raise TypeError(f"forward_step returned {type(carry).__name__} on {where}; {step}")
    for name, value in carry.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TypeError(f"forward_step returned {name!r}: {type(value).__name__} on {where}; {step}")
    return carry


def encode(form: Form) -> bytes:
    """Encode a form as JSON."""
    # Only what a receiver needs to allocate a tensor and to ask for its gradient.
    rows = [(e.name, e.shape, str(e.dtype).removeprefix("torch."), e.requires_grad) for e in form]
    return json.dumps(rows).encode()


def decode(text: bytes) -> Form:
    """Decode a form written by :func:`encode`."""
    return tuple(CarryEntry(n, tuple(shape), getattr(torch, dtype), grad) for n, shape, dtype, grad in json.loads(text))


def signature(batch: Any) -> Hashable | None:
    """Return a hashable value with everything in a micro-batch that shapes can depend on.

    Micro-batches with equal signatures have carries of equal form. All ranks of a pipeline see the same micro-batches,
    so both ends of a channel know without a message whether they know the form. None if the batch holds objects whose
    parts cannot be read.
    """
    try:
        return _signature(batch)
    except TypeError:
        # An unknown type: the form is then sent with each message.
        return None


def _signature(value: Any) -> Hashable:
    # Shapes and dtypes alone: values differ between micro-batches and have no part in the form.
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    # By identity: what it holds has no part in the form.
    if isinstance(value, Opaque):
        return id(value)
    if isinstance(value, Mapping):
        return tuple((key, _signature(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_signature, value))
    if dataclasses.is_dataclass(value):
        return type(value), tuple(_signature(getattr(value, field.name)) for field in dataclasses.fields(value))
    raise TypeError(f"unknown parts: {type(value).__name__}")
