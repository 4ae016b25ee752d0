"""The part of the model that one local parameter holds.

Checkpoints, gradient sync, norms, initialization and export are all based on it.

A *canonical* tensor is a parameter of the single-device model, under a name that is the same in every layout. A fused
weight appears as its parts (``...attention.qkv.weight`` is ``...attention.q.weight``, ``.k.``, ``.v.``).

For a box of a canonical tensor, each axis of one view of the mesh (``pp, dp, cp, tp`` or ``pp, edp, ep, etp``) is
exactly one of four things:

- *split*: ranks along it hold other boxes (or other tensors, as pipeline stages do);
- *data*: ranks hold the same box and see different tokens. Gradients are summed over these axes, and optimizer state is
  sharded over them. This is a property of the parameter: :attr:`ShardSpec.data`;
- *partial*: ranks hold the same box, and each has one term of its gradient: :attr:`ShardPiece.partial`;
- *duplicate*: ranks hold the same box and compute the same gradient.

Along partial and duplicate axes, one rank is the owner of the box (:attr:`ShardPiece.owner`). :func:`check_cover`
checks all of this over the specs of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import TypeAlias

from torch import Tensor

from megalight.errors import LayoutError
from megalight.parallel.mesh import DENSE_AXES, EXPERT_AXES, TENSOR_AXES, TOKEN_AXES, ParallelMesh


@dataclass(frozen=True)
class ShardPiece:
    """A box of one canonical tensor that lies contiguously inside one local parameter.

    Attributes:
        name: canonical name.
        shape: global shape of the canonical tensor.
        offset: start of the box in the canonical tensor, per dim.
        size: extent of the box, per dim.
        start: first element of the box in the flattened local parameter; it covers ``prod(size)`` elements, row-major.
        partial: mesh axes over which this rank's gradient is only one term of a sum (norm weights inside sequence
            regions, replicated KV heads). It must be summed over them before the optimizer uses it.
        owner: among the ranks that hold this same box and differ along axes other than the parameter's data axes,
            exactly one is the owner. It counts the box in norms, and writes it to checkpoints.
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
        """Number of elements of the box."""
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
        """Return a view of the box inside a local parameter (or a tensor of its shape), with the box's shape."""
        return parameter.reshape(-1)[self.start : self.stop].view(self.size)


@dataclass(frozen=True)
class ShardSpec:
    """The pieces of one local parameter. Elements in no piece are padding (a rounded-up vocabulary, for example).

    Attributes:
        pieces: in the order in which they lie in the parameter.
        shape: shape of the local parameter.
        data: mesh axes along which ranks hold this same parameter and see different tokens: its gradient is summed and
            its optimizer state is sharded over them.
    """

    pieces: tuple[ShardPiece, ...]
    shape: tuple[int, ...]
    data: tuple[str, ...] = TOKEN_AXES

    @classmethod
    def replicated(
        cls, name: str, shape: tuple[int, ...], *, partial: tuple[str, ...] = (), owner: bool = True
    ) -> ShardSpec:
        """Return the spec of a parameter that every rank holds whole."""
        return cls((ShardPiece(name, shape, (0,) * len(shape), shape, 0, partial, owner),), shape)

    @property
    def numel(self) -> int:
        """Number of elements of the local parameter, padding included."""
        return prod(self.shape)

    @property
    def holders(self) -> tuple[str, ...]:
        """Mesh axes along which ranks hold the same tensors, whole or in pieces: ``dp, cp, tp`` or ``edp, etp``."""
        view = DENSE_AXES if set(self.data) <= set(DENSE_AXES) else EXPERT_AXES
        return tuple(axis for axis in view if axis not in TENSOR_AXES)

    def cut(self, start: int, stop: int) -> Iterator[tuple[ShardPiece, int, int]]:
        """Yield the parts of elements ``[start, stop)`` of the flattened local parameter that belong to pieces.

        Yields:
            the piece, and the first and one-past-last element *within the flattened piece*.
        """
        for piece in self.pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                yield piece, low - piece.start, high - piece.start


def boxes(size: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Divide a flat interval ``[start, stop)`` of a row-major tensor of shape ``size`` into few row-major boxes.

    Each box is contiguous in the interval, so a flat slice can be viewed as the box without a copy.

    Yields:
        offset and extent of a box (ndim entries each), and its first element in the flattened tensor.
    """
    if not size:
        if start < stop:
            yield (), (), start
        return
    # Three kinds of boxes: the rest of a row that has begun, then all whole rows at once, then the begun last row.
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


def check_cover(mesh: ParallelMesh, specs: Sequence[Mapping[str, ShardSpec]]) -> None:
    """Check the rule at the top of this file over all ranks: for tests of a plan or a style, at any degrees.

    Args:
        mesh: the mesh, as any of its ranks sees it.
        specs: each rank's specs, in rank order.

    Raises:
        LayoutError: boxes of a tensor overlap or leave elements out; ranks whose gradients are summed hold different
            boxes; a box has no owner, or several; ranks that see different tokens do not sum their gradients.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    boxes_of: dict[str, dict[_Place, dict[int, tuple[ShardPiece, tuple[str, ...]]]]] = {}
    for rank, held in zip(mesh.members, specs, strict=True):
        for spec in held.values():
            for piece in spec.pieces:
                if shapes.setdefault(piece.name, piece.shape) != piece.shape:
                    raise LayoutError(f"{piece.name} has shapes {shapes[piece.name]} and {piece.shape}.")
                # A rank may hold no element of a tensor (padding alone). Empty boxes overlap nothing.
                if piece.numel:
                    found = boxes_of.setdefault(piece.name, {}).setdefault((piece.offset, piece.size), {})
                    found[rank] = piece, spec.data
    for name, places in boxes_of.items():
        _check_tiling(name, shapes[name], list(places))
        for (offset, size), holders in places.items():
            _check_holders(f"{name} at {offset}, {size}", mesh, holders)


_Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size of a box."""


def _check_tiling(name: str, shape: tuple[int, ...], places: Sequence[_Place]) -> None:
    for one, other in combinations(places, 2):
        if all(a < b + size_b and b < a + size_a for a, size_a, b, size_b in zip(*one, *other, strict=True)):
            raise LayoutError(f"boxes {one} and {other} of {name} overlap; ranks hold equal boxes or disjoint ones.")
    # Boxes are disjoint, so equal counts mean that no element is left out.
    covered = sum(prod(size) for _, size in places)
    if covered != prod(shape):
        raise LayoutError(f"the boxes of {name} hold {covered} of its {prod(shape)} elements.")


def _check_holders(box: str, mesh: ParallelMesh, holders: Mapping[int, tuple[ShardPiece, tuple[str, ...]]]) -> None:
    owners = {rank for rank, (piece, _) in holders.items() if piece.owner}
    if not owners:
        raise LayoutError(f"{box}: no rank owns it.")
    for rank, (piece, data) in holders.items():
        here = replace(mesh, global_rank=rank)
        # `copies` divide the optimizer state of the box. `summed` are all ranks with a term of its gradient.
        summed, copies = set(here.ranks(*data, *piece.partial)), set(here.ranks(*data))
        if set(data) & set(piece.partial):
            raise LayoutError(f"{box}: an axis is among both its data {data} and its partial axes {piece.partial}.")
        if any(_axes_of(holders.get(other)) != (data, piece.partial) for other in summed):
            raise LayoutError(f"{box}: the gradients of ranks {sorted(summed)} are summed, but not all hold it alike.")
        # For dense tensors only: experts also see tokens of other ranks.
        if set(data) <= set(DENSE_AXES) and not holders.keys() & set(here.ranks(*TOKEN_AXES)) <= summed:
            raise LayoutError(f"{box}: ranks along {TOKEN_AXES} see different tokens, but its data axes are {data}.")
        # A box may have several owners only if they are data-parallel copies: those divide its writing among
        # themselves.
        if rank in owners and owners != copies:
            raise LayoutError(f"{box}: ranks {sorted(owners)} own it; owners differ along its data axes {data} alone.")


def _axes_of(held: tuple[ShardPiece, tuple[str, ...]] | None) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    return None if held is None else (held[1], held[0].partial)
