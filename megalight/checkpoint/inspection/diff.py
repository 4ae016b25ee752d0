"""How two checkpoints differ: tensors that only one has, shapes, dtypes, values. No torch in here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod, sqrt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megalight.checkpoint.disk import publish
from megalight.checkpoint.disk.datafile import DataFile
from megalight.checkpoint.disk.files import CODES, FileRecord, PathLike, blocks
from megalight.checkpoint.disk.index import TensorInfo
from megalight.checkpoint.disk.manifest import read
from megalight.checkpoint.inspection.inspect import describe, floats


@dataclass(frozen=True)
class Difference:
    """One tensor that differs.

    Attributes:
        name: canonical name.
        ours, theirs: shape and dtype; None where a checkpoint lacks the tensor.
        relative: ``||a - b|| / ||a||`` (Euclidean norms, in float64), or None if values cannot be compared.
    """

    name: str
    ours: str | None
    theirs: str | None
    relative: float | None

    def __str__(self) -> str:
        if self.theirs is None or self.ours is None:
            return (
                f"{self.name}: only in the {'first' if self.theirs is None else 'second'} ({self.ours or self.theirs})"
            )
        kinds = "" if self.ours == self.theirs else f"{self.ours} and {self.theirs}"
        values = "" if self.relative is None else f"values differ by {self.relative:.3g} of the norm"
        return f"{self.name}: {', '.join(filter(None, (kinds, values)))}"


class Compared(Protocol):
    """One side of a comparison."""

    @property
    def tensors(self) -> Mapping[str, TensorKind]:
        """Shape and dtype by canonical name."""

    def values(self, name: str) -> NDArray[np.float64]:
        """Return a whole tensor: its shape, and a last dim of 1 (2 if it is complex)."""


class TensorKind(Protocol):
    """What a tensor is."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> str:
        """The dtype by torch's name."""


class DiffSource:
    """A checkpoint of ours. Every byte that is read is verified.

    Raises:
        CheckpointError: it is missing, unfinished or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = publish.place(path)
        self.tensors = describe(path).tensors

    def values(self, name: str) -> NDArray[np.float64]:
        """See :meth:`Compared.values`."""
        return _values(self._path, self.tensors[name])


def diff(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> list[Difference]:
    """Compare all tensors of two checkpoints, of any layouts. Every byte of both is verified.

    Raises:
        CheckpointError: one of them is missing, unfinished or damaged.
    """
    return differences(DiffSource(one), DiffSource(other))


def differences(one: Compared, other: Compared, prefix: str = "") -> list[Difference]:
    """Compare the tensors of two sides whose names begin with ``prefix``.

    Raises:
        CheckpointError: a file is damaged.
    """
    a, b = one.tensors, other.tensors
    found = []
    for name in sorted(name for name in a.keys() | b.keys() if name.startswith(prefix)):
        ours, theirs = _kind(a.get(name)), _kind(b.get(name))
        relative = None
        if name in a and name in b and a[name].shape == b[name].shape:
            relative = _relative(one.values(name), other.values(name))
        if relative is None or relative > 0 or ours != theirs:
            found.append(Difference(name, ours, theirs, relative))
    return found


def _kind(info: TensorKind | None) -> str | None:
    return None if info is None else f"{list(info.shape)} {info.dtype}"


def _relative(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    # NaN in the same place is no difference.
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    if same.all():
        return 0.0
    norm, distance = sqrt(float(np.square(one).sum())), sqrt(float(np.square(one - other).sum()))
    return distance / norm if norm else float("inf")


def _values(path: PathLike, info: TensorInfo) -> NDArray[np.float64]:
    """A whole tensor, from all its chunks."""
    root = publish.resolve(path)
    records: Mapping[str, FileRecord] = read(root).files
    pairs = 2 if info.dtype == "complex64" else 1
    whole = np.empty((*info.shape, pairs))
    for chunk in info.chunks:
        with DataFile(root, chunk.file, dict(records)) as file:
            file.verify(())
            parts = [
                floats(np.frombuffer(file.block(chunk.start + start, chunk.start + stop, digest), np.uint8), info.dtype)
                for (start, stop), digest in zip(
                    blocks(prod(chunk.size) * CODES[info.dtype][1]), chunk.sums, strict=True
                )
            ]
        box = tuple(slice(low, low + extent) for low, extent in zip(chunk.offset, chunk.size, strict=True))
        # A chunk without elements has no bytes to join.
        whole[box] = np.concatenate(parts).reshape(*chunk.size, pairs) if parts else 0
    return whole
