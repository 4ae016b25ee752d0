"""What a message says about itself before its data comes: names, shapes, dtypes, and which tensors want a gradient."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from megalight.errors import LayoutError


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a message.

    Attributes:
        dim: the batch dim, along which replicas' tensors are joined and split.
        gradient: whether the sender wants a gradient for it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    gradient: bool

    @property
    def rows(self) -> int:
        """Size along the batch dim."""
        return self.shape[self.dim]

    def with_rows(self, rows: int) -> TensorSpec:
        """The same with so many rows."""
        return replace(self, shape=(*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :]))

    def __str__(self) -> str:
        return f"{list(self.shape)} {_name(self.dtype)}{' that wants a gradient' * self.gradient}"


Header = dict[str, TensorSpec]
"""Tensors by name, in the order in which all ranks send and receive them."""


def encode(header: Header) -> bytes:
    """A header as it travels."""
    table = {name: (spec.shape, _name(spec.dtype), spec.dim, spec.gradient) for name, spec in header.items()}
    return json.dumps(table).encode()


def decode(text: bytes) -> Header:
    """The header that :func:`encode` wrote."""
    return {
        name: TensorSpec(tuple(shape), getattr(torch, dtype), dim, gradient)
        for name, (shape, dtype, dim, gradient) in json.loads(text).items()
    }


def joined(headers: Mapping[int, Header]) -> Header:
    """The header of all senders' rows, one after another.

    Args:
        headers: by global rank of the sender.

    Raises:
        LayoutError: they differ in more than their rows.
    """
    (first, reference), *others = headers.items()
    for rank, header in others:
        if _without_rows(header) != _without_rows(reference):
            raise LayoutError(
                f"ranks {first} and {rank} sent messages that cannot be joined: {_shown(reference)}; {_shown(header)}. "
                "Names, dtypes, which tensors want a gradient, and all sizes but the batch dim's must agree; a replica "
                "that skipped or repeated a message is the usual cause."
            )
    return {
        name: spec.with_rows(sum(header[name].rows for header in headers.values())) for name, spec in reference.items()
    }


def _without_rows(header: Header) -> Header:
    return {name: spec.with_rows(0) for name, spec in header.items()}


def _shown(header: Header) -> str:
    return ", ".join(f"{name} {spec}" for name, spec in header.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
