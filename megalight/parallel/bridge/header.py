"""The header of a message: names, shapes, dtypes, and which tensors require a gradient."""

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
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        dim: the batch dim, along which tensors are concatenated and split.
        gradient: whether the sender needs its gradient.
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
        """Return the same spec with another number of rows."""
        return replace(self, shape=(*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :]))

    def __str__(self) -> str:
        return f"{list(self.shape)} {_name(self.dtype)}{' that wants a gradient' * self.gradient}"


Header = dict[str, TensorSpec]
"""Specs by name, in the order in which all ranks send and receive the tensors."""


def encode(header: Header) -> bytes:
    """Encode a header as bytes."""
    table = {name: (spec.shape, _name(spec.dtype), spec.dim, spec.gradient) for name, spec in header.items()}
    return json.dumps(table).encode()


def decode(text: bytes) -> Header:
    """Decode a header written by :func:`encode`."""
    return {
        name: TensorSpec(tuple(shape), getattr(torch, dtype), dim, gradient)
        for name, (shape, dtype, dim, gradient) in json.loads(text).items()
    }


def joined(headers: Mapping[int, Header]) -> Header:
    """Return the header of the concatenated rows of all senders.

    Args:
        headers: global rank of the sender -> its header.

    Raises:
        LayoutError: the headers differ in more than their rows.
    """
    (first, reference), *others = headers.items()
    for rank, header in others:
        # Rows may differ, as replicas read different batches. Nothing else may: it would be
        # joined without an error.
        if _without_rows(header) != _without_rows(reference):
            raise LayoutError(
                f"ranks {first} and {rank} sent messages that cannot be joined: {_shown(reference)}; {_shown(header)}. "
                "Names, dtypes, required gradients and all sizes except the batch dim must be equal. Check that no "
                "replica skipped or repeated a message."
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
