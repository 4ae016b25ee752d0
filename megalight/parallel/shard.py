"""What part of the model one local parameter holds: the single source for checkpoints, gradient sync, norms,
initialisation and export.

A *canonical* tensor is a parameter of the one-device model under a name that no layout changes; a fused weight appears
as its parts (``...attention.qkv.weight`` is ``...attention.q.weight``, ``.k.``, ``.v.``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A box of one canonical tensor that lies contiguously inside one local parameter.

    Attributes:
        name: canonical name.
        shape: global shape of the canonical tensor.
        offset: where the box starts in it, per dim.
        size: the box's extent, per dim.
        start: first element of the box in the flattened local parameter; it covers ``prod(size)`` elements, row-major.
        partial: mesh axes over which this rank's gradient is only one term of a sum (norm weights inside sequence
            regions, replicated KV heads). It must be summed over them before the optimizer sees it.
        owner: among the model-parallel ranks (all but dp and cp) that hold this same box, exactly one is the owner: it
            counts the box in norms and writes it to checkpoints.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int = 0
    partial: tuple[str, ...] = ()
    owner: bool = True

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(self.size)

    @property
    def stop(self) -> int:
        """One past the last element in the flattened local parameter."""
        return self.start + self.numel

    @property
    def box(self) -> tuple[slice, ...]:
        """The box as an index into the canonical tensor."""
        return tuple(slice(first, first + extent) for first, extent in zip(self.offset, self.size, strict=True))

    def view(self, parameter: Tensor) -> Tensor:
        """The box inside a local parameter (or a tensor of its shape), with the box's own shape. A view."""
        return parameter.reshape(-1)[self.start : self.stop].view(self.size)


@dataclass(frozen=True)
class ShardSpec:
    """The pieces of one local parameter. Elements that no piece covers are padding (a vocabulary rounded up, say)."""

    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]

    @classmethod
    def replicated(
        cls, name: str, shape: tuple[int, ...], *, partial: tuple[str, ...] = (), owner: bool = True
    ) -> ShardSpec:
        """A parameter that every rank holds whole."""
        return cls((Piece(name, shape, (0,) * len(shape), shape, 0, partial, owner),), shape)

    @property
    def numel(self) -> int:
        """Elements of the local parameter, padding included."""
        return prod(self.shape)

    def cut(self, start: int, stop: int) -> Iterator[tuple[Piece, int, int]]:
        """The parts of elements ``[start, stop)`` of the flattened local parameter that belong to pieces.

        Yields:
            the piece, and the first and one-past-last element *within the flattened piece*.
        """
        for piece in self.pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                yield piece, low - piece.start, high - piece.start


def boxes(size: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """A flat interval ``[start, stop)`` of a row-major tensor of shape ``size`` as few row-major boxes.

    Each box is contiguous in the interval, so a flat slice can be viewed as the box without a copy.

    Yields:
        offset and extent of a box (ndim entries each), and its first element in the flattened tensor.
    """
    if not size:
        if start < stop:
            yield (), (), start
        return
    inner = prod(size[1:])
    while start < stop:
        row, into = divmod(start, inner) if inner else (0, 0)
        if into == 0 and (rows := (stop - start) // inner) > 0:
            yield (row,) + (0,) * (len(size) - 1), (rows, *size[1:]), start
            start += rows * inner
        else:
            end = min(stop, (row + 1) * inner)
            for offset, extent, first in boxes(size[1:], into, end - row * inner):
                yield (row, *offset), (1, *extent), first + row * inner
            start = end
