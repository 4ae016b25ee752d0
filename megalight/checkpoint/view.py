"""Canonical tensors as this rank holds them: what torch Distributed Checkpoint (DCP) saves from and loads into.

A :class:`View` stands for one whole canonical tensor. It owns no memory: its boxes are views of local parameters or of
flat optimizer shards. DCP asks it what to write, what is held here, and for the memory of a box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megalight.checkpoint.boxes import THREADS
from megalight.errors import CheckpointError, nearest
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec, boxes
from megalight.parallel.source import FlatSource, Source, Target, shard_boxes

BUDGET = 256 << 20
"""Bytes of tensors that are read together. One tensor alone may be larger."""

SPLIT = 16 << 20
"""Bytes of a tensor above which several threads read it."""


def itself(tensor: Tensor) -> list[Tensor]:
    """Return the tensor: the only part of a tensor that is stored as it is."""
    return [tensor]


@dataclass(frozen=True)
class WantedTensor:
    """A tensor to read.

    Attributes:
        dtype: its dtype; stored values are converted.
        parts: canonical name -> the views of the tensor that this canonical tensor fills, from its first row to its
            last. A tensor without dims has one view.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[str, Callable[[Tensor], Sequence[Tensor]]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def targets(self, memory: Tensor) -> Iterator[Target]:
        """Yield the boxes to fill in ``memory``. Large parts are cut by rows, so that several threads read them."""
        for name, view in self.parts.items():
            views = view(memory)
            inner = views[0].shape[1:]
            if views[0].ndim == 0:
                yield Target(name, (), (), views[0])
                continue
            shape, start = (sum(map(len, views)), *inner), 0
            for data in views:
                # Of a large one, a part for each thread, by rows.
                step = len(data) if data.nbytes <= SPLIT else -(-len(data) // THREADS)
                for first in range(0, max(len(data), 1), max(step, 1)):
                    yield Target(name, shape, (start + first, *(0,) * len(inner)), data[first : first + step])
                start += len(data)


def stream(
    source: Source, wanted: Iterable[WantedTensor], process_group: ProcessGroup | None = None
) -> Iterator[Tensor]:
    """Yield the tensors in order, on the CPU. At most ``BUDGET`` bytes, or one tensor, are held at a time.

    Args:
        source: where values are read.
        process_group: this process alone; see :func:`megalight.checkpoint.ranks.alone`.

    Raises:
        CheckpointError: a part is not in the source, or has another shape, or a file is damaged.
    """
    for group in _groups(wanted):
        memory = [torch.empty(each.shape, dtype=each.dtype) for each in group]
        targets = [box for each, room in zip(group, memory, strict=True) for box in each.targets(room)]
        filled = source.fill(targets, strict=False, process_group=process_group)
        if filled.missing:
            raise CheckpointError(f"{', '.join(filled.missing[:5])} not in the source; it holds another model.")
        # The boxes are views, and would keep the memory of tensors that were handed out.
        targets.clear()
        memory.reverse()
        # Handed out from the end, and forgotten here: the caller decides how long each tensor lives.
        while memory:
            yield memory.pop()


def _groups(wanted: Iterable[WantedTensor]) -> Iterator[list[WantedTensor]]:
    group: list[WantedTensor] = []
    names: set[str] = set()
    size = 0
    for each in wanted:
        # a tensor that is wanted twice is read twice: one fill reads each box once
        if group and (size + each.nbytes > BUDGET or not names.isdisjoint(each.parts)):
            yield group
            group, names, size = [], set(), 0
        group.append(each)
        names |= each.parts.keys()
        size += each.nbytes
    if group:
        yield group


@dataclass(frozen=True)
class Box:
    """A box of a canonical tensor that this rank holds.

    Attributes:
        offset: where it starts in the canonical tensor, per dim.
        data: its elements, with the box's own shape: a view of local memory.
        write: whether this rank writes it to checkpoints (of all ranks that hold an element, exactly one does).
    """

    offset: tuple[int, ...]
    data: Tensor
    write: bool = True

    def cut(self, start: int, stop: int) -> Iterator[Box]:
        """Elements ``[start, stop)`` of the flattened box, as a few boxes."""
        flat = self.data.view(-1)
        for offset, size, first in boxes(tuple(self.data.shape), start, stop):
            data = flat[first : first + prod(size)].view(size)
            yield Box(tuple(a + b for a, b in zip(self.offset, offset, strict=True)), data, self.write)


class View(Tensor):
    """One canonical tensor: its global shape and dtype, and the boxes of it that this rank holds.

    It is a tensor only because DCP asks for tensors; operations on it are refused.
    """

    canonical: str
    boxes: tuple[Box, ...]
    reading: BoxReading | None = None
    """Where its boxes are read when they are written, if they have no memory."""

    @staticmethod
    def __new__(cls, name: str, shape: Sequence[int], boxes: Sequence[Box]) -> View:
        """A view over ``boxes`` (at least one; all of one dtype)."""
        # A wrapper without memory. Its dtype and shape are those of the whole tensor.
        view: View = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=boxes[0].data.dtype, device=boxes[0].data.device
        )
        view.canonical = name
        view.boxes = tuple(boxes)
        if len({box.data.dtype for box in boxes}) > 1:
            raise CheckpointError(f"{name!r} is held in several dtypes; hold all parts of a tensor in one.")
        # DCP knows a box by its offset alone.
        if len({box.offset for box in boxes}) < len(boxes):
            raise CheckpointError(f"{name!r} has two parts at one place; give each part of a tensor once.")
        return view

    def __init__(self, name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = sum(box.data.numel() for box in self.boxes)
        return f"View({self.canonical!r}, shape={list(self.shape)}, {self.dtype}, {held} elements here)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse: a view is a handle."""
        raise CheckpointError(f"{func} on a checkpoint view; views are only saved and loaded. Use its boxes' data.")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """DCP: what this rank writes."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.shape),
            )
            # Ranks that hold the same box share the writing, so some of its boxes are another one's to write.
            for box in self.boxes
            if box.write
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """DCP: what this rank holds, for a load to fill."""
        return [_chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """DCP: the memory of one box."""
        for box in self.boxes:
            if index.offset == torch.Size(box.offset):
                return box.data
        raise CheckpointError(f"{self.canonical!r} holds no box at {index.offset} on this rank.")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=box.data.shape)


@dataclass(frozen=True)
class _HeldBox:
    """A box with the canonical tensor it belongs to; ``replicas``: ranks that hold it, and this one's place."""

    name: str
    shape: tuple[int, ...]
    box: Box
    replicas: tuple[tuple[int, ...], int] = (0,), 0


def views_of_parameters(
    named_parameters: Iterable[tuple[str, Tensor]],
    specs: Mapping[str, ShardSpec],
    mesh: ParallelMesh | Callable[[str], ParallelMesh],
    *,
    prefix: str = "",
) -> dict[str, View]:
    """Views of local parameters (or buffers), by ``prefix`` + canonical name.

    Args:
        mesh: the mesh of ranks, or a function from a local name to it.

    Ranks along a parameter's data axes hold the same; each writes an equal share of what they all hold.

    Raises:
        CheckpointError: a parameter without a spec, of another shape than its spec says, or not contiguous.
    """
    held = []
    for name, parameter in named_parameters:
        if name not in specs:
            raise CheckpointError(
                f"parameter {name!r} has no ShardSpec, so its place in a checkpoint is unknown.{nearest(name, specs)} "
                "Pass the specs that parallelize() returned for this very model."
            )
        # Detached, and a view all the same: what is written is the parameter's own memory.
        spec, data = specs[name], parameter.detach()
        if tuple(data.shape) != spec.shape or not data.is_contiguous():
            state = "" if data.is_contiguous() else " (not contiguous)"
            raise CheckpointError(
                f"parameter {name!r} has shape {list(data.shape)}{state}; its spec says {list(spec.shape)}, contiguous."
            )
        grid = mesh if isinstance(mesh, ParallelMesh) else mesh(name)
        ranks = grid.ranks(*spec.data)
        replicas = ranks, ranks.index(grid.global_rank)
        held += [
            _HeldBox(prefix + piece.name, piece.shape, Box(piece.offset, piece.view(data), piece.owner), replicas)
            for piece in spec.pieces
        ]
    return _collect(held)


def views_of_shards(
    tensors: Iterable[Tensor],
    shards: Iterable[FlatSource],
    *,
    prefix: str = "",
) -> dict[str, View]:
    """Views of flat tensors (masters, or one optimizer state per shard), by ``prefix`` + canonical name.

    A flat interval of an n-dim tensor becomes a few row-major boxes: no gather, no copy.

    Args:
        tensors: one flat tensor per shard, laid out as the shard is.
        prefix: what to call this state, e.g. ``"optimizer.exp_avg."``.
    """
    held = []
    for tensor, shard in zip(tensors, shards, strict=True):
        held += [
            _HeldBox(prefix + piece.name, piece.shape, Box(offset, data, piece.owner), (shard.replicas, shard.place))
            for piece, offset, data in shard_boxes(tensor, shard)
        ]
    return _collect(held)


def views_of_pieces(tensors: Iterable[Tensor], shards: Iterable[FlatSource], *, prefix: str = "") -> dict[str, View]:
    """Views of flat tensors as they lie: one view per piece of a canonical tensor that a parameter holds.

    The view is the flattened piece, ``[numel]``. Its name (:func:`piece_name`) says which part of which tensor it is.
    An interval of a piece is one box, while :func:`views_of_shards` needs several boxes for an n-dim tensor.

    Args:
        tensors: one flat tensor per shard, laid out as the shard is.
        prefix: what to call this state, e.g. ``"optimizer.exp_avg."``.
    """
    held = []
    for tensor, shard in zip(tensors, shards, strict=True):
        # Flat tensors are concatenated, so a piece is one box.
        flat = tensor.detach().view(-1)
        for piece, first, last, start in shard.intervals():
            box = Box((first,), flat[start : start + last - first], piece.owner)
            name = prefix + piece_name(piece.name, piece.offset, piece.size)
            held.append(_HeldBox(name, (prod(piece.size),), box, (shard.replicas, shard.place)))
    return _collect(held)


def piece_name(name: str, offset: Sequence[int], size: Sequence[int]) -> str:
    """Return the name of a flattened piece: ``layers.0.mlp.up.weight@64,0+64,32`` (offset and size)."""
    return f"{name}@{','.join(map(str, offset))}+{','.join(map(str, size))}"


@dataclass(frozen=True, eq=False)
class BoxReading:
    """How the boxes of views without memory get their values. So a source of any size becomes a checkpoint.

    Attributes:
        stored: name of a view -> name and shape of the source's tensor. Another shape (flattened) has equal elements.
    """

    source: Source
    stored: Mapping[str, tuple[str, tuple[int, ...]]]
    process_group: ProcessGroup | None

    def elements(self, held: Iterable[tuple[View, Box]]) -> Iterator[Tensor]:
        """Yield whole tensors in order. They are read together, up to the bytes that :func:`stream` holds."""
        return stream(self.source, (self._wanted(view, box) for view, box in held), self.process_group)

    def _wanted(self, view: View, box: Box) -> WantedTensor:
        name, shape = self.stored[view.canonical]
        room = tuple(box.data.shape)
        return WantedTensor(room, box.data.dtype, {name: itself if room == shape else partial(_shaped, shape)})


def elements(held: Iterable[tuple[View, Box]]) -> Iterator[Tensor]:
    """Yield the elements of boxes in order, to be written. Those of one source are read together, in a few passes."""
    for reading, together in groupby(held, lambda each: each[0].reading):
        if reading is None:
            yield from (box.data for _, box in together)
        else:
            yield from reading.elements(together)


def views_of_source(
    source: Source,
    names: Iterable[str],
    dtype: torch.dtype | None = None,
    process_group: ProcessGroup | None = None,
    flat: bool = False,
) -> dict[str, View]:
    """Views of whole tensors of a source, written by this process alone.

    Args:
        source: read while views are written, by :func:`elements`.
        dtype: dtype of floating-point tensors in the checkpoint; None: as they are stored.
        process_group: this process alone; see :func:`megalight.checkpoint.ranks.alone`.
        flat: each is one flattened piece, as :func:`views_of_pieces` writes tensors that are not split.
    """
    views: dict[str, View] = {}
    # Once: a source made of others may list its names again each time.
    tensors = source.tensors
    places: dict[str, tuple[str, tuple[int, ...]]] = {}
    reading = BoxReading(source, places, process_group)
    for name in names:
        stored = tensors[name]
        kind = getattr(torch, stored.dtype)
        kind = dtype if dtype is not None and kind.is_floating_point else kind
        shape = (prod(stored.shape),) if flat else stored.shape
        key = piece_name(name, (0,) * len(stored.shape), stored.shape) if flat else name
        # On meta: sizes are known before anything is read.
        room = torch.empty(shape, dtype=kind, device="meta")
        view = View(key, shape, [Box((0,) * len(shape), room)])
        view.reading, places[key] = reading, (name, tuple(stored.shape))
        views[key] = view
    return views


def _shaped(shape: tuple[int, ...], tensor: Tensor) -> list[Tensor]:
    return [tensor.view(shape)]


def targets_of(views: Mapping[str, View]) -> list[Target]:
    """The memory of views, to be filled from a source: what one save wrote from them, a load reads into them."""
    return [Target(name, tuple(view.shape), box.offset, box.data) for name, view in views.items() for box in view.boxes]


def views_to_fill(targets: Iterable[Target]) -> dict[str, View]:
    """What DCP fills. Writes nothing."""
    return _collect([_HeldBox(t.name, t.shape, Box(t.offset, t.data, write=False)) for t in targets])


def _share(held: Sequence[_HeldBox], replicas: tuple[int, ...], place: int) -> Iterator[_HeldBox]:
    """Let each of the ranks that all hold these boxes write an equal, contiguous part of them.

    The boxes to be written are concatenated and cut into equal parts, at whole rows. Only the boxes at this rank's two
    ends are cut.
    """
    total = sum(item.box.data.numel() for item in held if item.box.write)
    low, high = total * place // len(replicas), total * (place + 1) // len(replicas)
    position = 0
    for item in held:
        box, numel = item.box, item.box.data.numel()
        if not box.write:
            yield item
            continue
        # At whole rows: a cut inside a row would give several boxes more.
        row = max(1, prod(box.data.shape[1:]))
        first, last = (min(max(bound - position, 0), numel) // row * row for bound in (low, high))
        position += numel
        for start, stop in pairwise(sorted({0, first, last, numel})):
            mine = replace(box, write=first <= start and stop <= last)
            for part in mine.cut(start, stop):
                yield replace(item, box=part)


def _collect(held: Sequence[_HeldBox]) -> dict[str, View]:
    """One view per name. Parts without elements (of ranks that hold only padding) are left out."""
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, list[Box]] = {}
    # Ranks share the writing of what they all hold. What else each of them holds has no part in that.
    alike: dict[tuple[tuple[int, ...], int], list[_HeldBox]] = {}
    for item in held:
        alike.setdefault(item.replicas, []).append(item)
    for item in chain.from_iterable(_share(items, *replicas) for replicas, items in alike.items()):
        # A rank of padding alone holds no element, and DCP takes no empty box.
        if item.box.data.numel():
            if shapes.setdefault(item.name, item.shape) != item.shape:
                raise CheckpointError(f"{item.name!r} has shapes {shapes[item.name]} and {item.shape} on one rank.")
            parts.setdefault(item.name, []).append(item.box)
    return {name: View(name, shapes[name], found) for name, found in parts.items()}
