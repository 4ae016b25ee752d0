"""The part of the model that one local parameter holds, and the rules that split parameters.

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

Rules (:func:`replicated`, :func:`output_features`, ...) make a spec from the canonical parts and the shape of a
parameter of the single-device model, and the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import TypeAlias

from torch import Tensor

from megalight.errors import LayoutError
from megalight.nn.canonical import CanonicalPart
from megalight.parallel.degrees import replicas_of
from megalight.parallel.mesh import (
    DENSE_AXES,
    EXPERT_AXES,
    EXPERT_DATA_AXES,
    TENSOR_AXES,
    TOKEN_AXES,
    ParallelMesh,
)


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


def replicated(
    parts: Sequence[CanonicalPart], shape: tuple[int, ...], mesh: ParallelMesh, *, partial: bool
) -> ShardSpec:
    """Every ``tp`` rank holds the whole; ``partial``: each rank's gradient is one term of a sum over ``tp``."""
    axes = ("tp",) if partial and mesh.tp > 1 else ()
    owner = mesh.rank("tp") == 0
    pieces = (ShardPiece(p.name, p.shape, (0,) * len(p.shape), p.shape, p.start, axes, owner) for p in parts)
    return ShardSpec(tuple(pieces), shape)


def output_features(
    parts: Sequence[CanonicalPart],
    shape: tuple[int, ...],
    mesh: ParallelMesh,
    *,
    units: Sequence[int],
    shared: bool = False,
) -> ShardSpec:
    """Split dim 0 of each part over ``tp`` in whole units; if there are fewer units than ranks, ranks share units.

    Args:
        parts: the sections of a fused weight or bias.
        units: number of units of each section.
        shared: whether the section with the most units may be shared too. Ranks that hold the same units of *every*
            section would add up the same terms in the next row-split layer.

    Raises:
        LayoutError: ``tp`` neither divides the units nor, where they may be shared, is divided by them.
    """
    pieces, start, most = [], 0, max(units)
    for part, count in zip(parts, units, strict=True):
        # Grouped-query attention with fewer key heads than ranks: neighboring ranks hold the same key head.
        replicas = replicas_of(count, mesh.tp, part.name, may_share=shared or count < most)
        axis = f"tp%{replicas}"
        shards = mesh.tp // replicas
        size = (part.shape[0] // shards, *part.shape[1:])
        offset = (mesh.rank(f"tp/{replicas}") * size[0],) + (0,) * (len(size) - 1)
        owner = mesh.rank(axis) == 0
        # Replicas serve different query heads, so each has one term of the gradient of the shared unit: partial over
        # `axis`.
        pieces.append(ShardPiece(part.name, part.shape, offset, size, start, (axis,) if replicas > 1 else (), owner))
        start = pieces[-1].stop
    return ShardSpec(tuple(pieces), (sum(p.size[0] for p in pieces), *parts[0].shape[1:]))


def sections(
    parts: Sequence[CanonicalPart],
    shape: tuple[int, ...],
    mesh: ParallelMesh,
    *,
    sizes: Sequence[int],
    units: Sequence[int] = (),
    dim: int = 0,
) -> ShardSpec:
    """Split a dim of one tensor over ``tp`` section by section: a rank holds its share of each section.

    Args:
        parts: the tensor alone.
        shape: its shape.
        mesh: the mesh of ranks.
        sizes: features of each section.
        units: indivisible units (heads) of each section; ranks share those of a section that has fewer than another.
            Empty: every feature is one, and none are shared.
        dim: the dim that has sections. Of dim 1, a rank holds its share of one section below that of the one before.

    Raises:
        LayoutError: ``tp`` does not divide a section, or sections are not all features.
    """
    (part,) = parts
    if sum(sizes) != part.shape[dim]:
        raise LayoutError(f"{part.name} has {part.shape[dim]} features, and its sections have {sum(sizes)}.")
    pieces, start, first = [], 0, 0
    for section, count in zip(sizes, units or sizes, strict=True):
        replicas = replicas_of(count, mesh.tp, part.name, may_share=bool(units) and count < max(units))
        axis, size, offset = f"tp%{replicas}", list(part.shape), [0] * len(part.shape)
        size[dim] = section * replicas // mesh.tp
        offset[dim] = first + mesh.rank(f"tp/{replicas}") * size[dim]
        partial, owner = (axis,) if replicas > 1 else (), mesh.rank(axis) == 0
        pieces.append(ShardPiece(part.name, part.shape, tuple(offset), tuple(size), start, partial, owner))
        start, first = pieces[-1].stop, first + section
    if dim and len({piece.size for piece in pieces}) > 1:
        raise LayoutError(f"{part.name} has sections of different sizes along dim {dim}, which cannot be one tensor.")
    rows = sum(piece.size[0] for piece in pieces)
    return ShardSpec(tuple(pieces), (rows, *pieces[0].size[1:]))


def along(parts: Sequence[CanonicalPart], shape: tuple[int, ...], mesh: ParallelMesh, *, dim: int) -> ShardSpec:
    """Split one dim of a tensor over ``tp``; dim 1 of a weight ``[out, in]`` is its input features.

    Raises:
        LayoutError: ``tp`` does not divide it.
    """
    (part,) = parts
    replicas_of(part.shape[dim], mesh.tp, part.name, may_share=False)
    size, offset = list(part.shape), [0] * len(part.shape)
    size[dim] //= mesh.tp
    offset[dim] = mesh.rank("tp") * size[dim]
    return ShardSpec((ShardPiece(part.name, part.shape, tuple(offset), tuple(size)),), tuple(size))


def stack(parts: Sequence[CanonicalPart], shape: tuple[int, ...], mesh: ParallelMesh, *, dim: int | None) -> ShardSpec:
    """Split a parameter ``[E, ...]`` of stacked experts: whole experts over ``ep``, and one dim of each over ``etp``.

    Args:
        parts: equally many of each expert, expert by expert.
        dim: the dim of each part that ``etp`` divides; None: no dim, and there is one rank along ``etp``.

    Raises:
        LayoutError: ``ep`` does not divide the experts, or ``etp`` their inner width.
    """
    count, ep = shape[0], mesh.ep
    if count % ep:
        raise LayoutError(f"{parts[0].parameter} holds {count} experts, and ep={ep} does not divide them. Lower ep.")
    each, here = len(parts) // count, count // ep
    size, offset, local = list(parts[0].shape), [0] * len(parts[0].shape), list(shape[1:])
    if dim is not None:
        if size[dim] % mesh.etp:
            raise LayoutError(
                f"{parts[0].name} has an inner width of {size[dim]}, and etp={mesh.etp} does not divide it. Lower etp."
            )
        size[dim] //= mesh.etp
        offset[dim] = mesh.rank("etp") * size[dim]
        local[dim] //= mesh.etp
    # Neighboring experts stay together, so a rank's part of a stack is contiguous in a checkpoint.
    mine = parts[mesh.rank("ep") * here * each :][: here * each]
    pieces = (
        ShardPiece(part.name, part.shape, tuple(offset), tuple(size), place * prod(size))
        for place, part in enumerate(mine)
    )
    return ShardSpec(tuple(pieces), (here, *local), EXPERT_DATA_AXES)


def experts(
    parts: Sequence[CanonicalPart],
    shape: tuple[int, ...],
    mesh: ParallelMesh,
    *,
    axis: str = "etp",
    dim: int | None = None,
    sections: int = 1,
) -> ShardSpec:
    """Split one tensor ``[E, ...]`` of stacked experts over ``ep``, and one of its dims over an axis.

    Args:
        parts: the tensor alone.
        shape: its shape.
        mesh: the mesh of ranks.
        axis: ``etp``, or ``tp`` where ``ep`` and ``etp`` have one rank.
        dim: the inner width; None: ranks along the axis hold all of it, and each has a term of its gradient.
        sections: equal sections of that dim, of each of which a rank holds its part. Several: the dim is 1.

    Raises:
        LayoutError: ``ep`` does not divide the experts, or the axis a section.
    """
    (part,) = parts
    data = TOKEN_AXES if axis == "tp" else EXPERT_DATA_AXES
    if shape[0] % mesh.ep:
        raise LayoutError(f"{part.name} holds {shape[0]} experts, and ep={mesh.ep} does not divide them. Lower ep.")
    count, ranks, rank = shape[0] // mesh.ep, mesh.size(axis), mesh.rank(axis)
    size, offset = [count, *shape[1:]], [mesh.rank("ep") * count] + [0] * (len(shape) - 1)
    if dim is None:
        axes, owner = ((axis,) if ranks > 1 else ()), rank == 0
        return ShardSpec((ShardPiece(part.name, shape, tuple(offset), tuple(size), 0, axes, owner),), tuple(size), data)
    width = shape[dim] // sections
    if width % ranks:
        raise LayoutError(
            f"{part.name}: experts have an inner width of {width}, and {axis}={ranks} does not divide it. Lower {axis}."
        )
    size[dim] = width // ranks
    boxes = []
    # What lies one after another in this rank's tensor: all of it, or one section of one expert.
    for expert in range(count if sections > 1 else 1):
        for section in range(sections):
            box = [offset[0] + expert, *offset[1:]]
            box[dim] = section * width + rank * size[dim]
            boxes.append(tuple(box))
    each = (1, *size[1:]) if sections > 1 else tuple(size)
    pieces = (ShardPiece(part.name, shape, box, each, place * prod(each)) for place, box in enumerate(boxes))
    size[dim] *= sections
    return ShardSpec(tuple(pieces), tuple(size), data)


def vocabulary(parts: Sequence[CanonicalPart], shape: tuple[int, ...], mesh: ParallelMesh) -> ShardSpec:
    """Split dim 0 over ``tp`` into equal numbers of rows; rows of the last rank beyond the vocabulary are padding.

    Raises:
        LayoutError: a rank would hold only padding.
    """
    (part,) = parts
    # Rounded up: all ranks need the same shape, and the last one pads.
    rows = -(-part.shape[0] // mesh.tp)
    first = mesh.rank("tp") * rows
    if rows * (mesh.tp - 1) >= part.shape[0]:
        raise LayoutError(
            f"{part.name}: a vocabulary of {part.shape[0]} rows cannot be split over tp={mesh.tp}, as some ranks would "
            "hold none. Lower tp."
        )
    size = (min(rows, part.shape[0] - first), *part.shape[1:])
    offset = (first,) + (0,) * (len(size) - 1)
    piece = ShardPiece(part.name, part.shape, offset, size)
    return ShardSpec((piece,), (rows, *part.shape[1:]))


def take(whole: Tensor, parts: Sequence[CanonicalPart], spec: ShardSpec, local: Tensor) -> None:
    """Copy this rank's pieces of a single-device parameter ``whole`` into ``local``; padding becomes 0."""
    if sum(piece.numel for piece in spec.pieces) < spec.numel:
        # Padding must not be left uninitialized: it is saved, and enters norms.
        local.zero_()
    starts = {part.name: part for part in parts}
    flat = whole.reshape(-1)
    for piece in spec.pieces:
        part = starts[piece.name]
        canonical = flat[part.start : part.start + prod(part.shape)].view(part.shape)
        piece.view(local).copy_(canonical[piece.box])


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
