"""Shards of a parameter: columns, rows, vocabularies, expert stacks and replicas; means over split features.

Each rule takes the canonical parts and the shape of a parameter of the single-device model, and the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from megalight.errors import LayoutError
from megalight.nn.canonical import CanonicalPart
from megalight.parallel.collectives import all_reduce, copy
from megalight.parallel.degrees import replicas_of
from megalight.parallel.mesh import EXPERT_DATA_AXES, TOKEN_AXES, ParallelMesh
from megalight.parallel.shard import ShardPiece, ShardSpec
from megalight.parallel.tensor.shared import Shared


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


@dataclass(frozen=True)
class GroupMean:
    """The mean of the values of neighboring ``tp`` ranks, whose parts of a group of features are of one size.

    Several ranks may hold the same part, if all parts have equally many holders.

    Attributes:
        shared: the state that all tensor-parallel layers share.
        ranks: number of ranks that hold a group.
    """

    shared: Shared
    ranks: int

    def __call__(self, part: Tensor) -> Tensor:
        """Return the mean, in the shape of ``part``. The backward sums gradients over the ranks, too."""
        mesh = self.shared.mesh
        group = self.shared.group if self.ranks == mesh.tp else mesh.group(f"tp%{self.ranks}")
        # The sum enters the features of every rank, so each has one term of its gradient.
        return copy(all_reduce(part, group), group) / self.ranks
