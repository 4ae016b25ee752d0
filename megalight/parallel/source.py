"""Sources of values: tensors by canonical name, read lazily, box by box, into the memory of this rank.

A source may be a checkpoint of ours or a folder of another library. Who has memory to fill describes it as
:class:`Target` boxes; the source reads what lies in them and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.nn.canonical import canonical_tensors
from megalight.parallel.shard import Piece, ShardSpec, boxes


@dataclass(frozen=True)
class Target:
    """Memory of this rank that a box of a canonical tensor is read into.

    Attributes:
        name: canonical name.
        shape: global shape of the canonical tensor.
        offset: where the box starts in it, per dim.
        data: the memory, in the box's own shape and in any dtype: a view of a local parameter or of a flat shard.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True)
class Filled:
    """What a fill that was not strict left out.

    Attributes:
        missing: asked for on this rank, but not in the source: unchanged.
        unexpected: in the source under the prefix, but asked for by no rank.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class Stored(Protocol):
    """What a source says of one tensor without reading it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""

    @property
    def dtype(self) -> str:
        """Torch's name for it (``bfloat16``)."""


class Source(Protocol):
    """Tensors by canonical name."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """What is there."""

    def fill(
        self,
        targets: Iterable[Target],
        *,
        strict: bool = True,
        prefix: str = "",
        process_group: ProcessGroup | None = None,
    ) -> Filled:
        """Read this rank's boxes, converted to the dtypes of their memory. All ranks of the group call it together.

        Args:
            targets: this rank's boxes.
            strict: names must agree: every target is in the source, and the targets of all ranks together ask for
                every tensor in it whose name begins with ``prefix``.
            prefix: see ``strict``. One model is one prefix.
            process_group: who calls; None means the default group, or this process alone.

        Raises:
            CheckpointError: on every rank, before any memory has changed: names or shapes differ, or a file is torn.
        """


@dataclass(frozen=True)
class Renamed:
    """A source seen under another prefix: a teacher (``teacher.``) is filled from what was saved as ``model.``.

    Attributes:
        source: whose tensors are read. Those whose names do not begin with ``theirs`` are not seen.
        ours: what names begin with for the caller.
        theirs: what they begin with in the source.
    """

    source: Source
    ours: str
    theirs: str

    @property
    def tensors(self) -> dict[str, Stored]:
        """What is there, by our names."""
        found = self.source.tensors.items()
        return {self._to_ours(name): stored for name, stored in found if name.startswith(self.theirs)}

    def fill(
        self,
        targets: Iterable[Target],
        *,
        strict: bool = True,
        prefix: str = "",
        process_group: ProcessGroup | None = None,
    ) -> Filled:
        """See :meth:`Source.fill`; errors speak of the source's own names."""
        filled = self.source.fill(
            (replace(target, name=self._to_theirs(target.name)) for target in targets),
            strict=strict,
            prefix=self._to_theirs(prefix or self.ours),
            process_group=process_group,
        )
        return Filled(tuple(map(self._to_ours, filled.missing)), tuple(map(self._to_ours, filled.unexpected)))

    def _to_ours(self, name: str) -> str:
        return self.ours + name.removeprefix(self.theirs)

    def _to_theirs(self, name: str) -> str:
        return self.theirs + name.removeprefix(self.ours)


def model_targets(model: nn.Module, prefix: str = "") -> Iterator[Target]:
    """The parameters of a whole one-device model.

    Args:
        model: off the meta device.
        prefix: put before every canonical name.
    """
    for name, tensor in canonical_tensors(model).items():
        yield Target(prefix + name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


def parameter_targets(tensors: Iterable[tuple[str, Tensor]], specs: Mapping[str, ShardSpec]) -> Iterator[Target]:
    """The boxes of local parameters and buffers. Padding, which no piece covers, is in none of them.

    Args:
        tensors: local name -> tensor, contiguous.
        specs: local name -> what it holds of which canonical tensors.
    """
    for name, tensor in tensors:
        flat = tensor.detach().view(-1)
        for piece in specs[name].pieces:
            yield Target(piece.name, piece.shape, piece.offset, piece.view(flat))


class FlatShard(Protocol):
    """A rank's flat share of parameters or optimizer state, and which canonical elements lie where in it.

    Attributes:
        replicas: ranks that hold this same shard; each writes a part to checkpoints.
        place: of this rank among them.
    """

    replicas: tuple[int, ...]
    place: int

    def intervals(self) -> Iterable[tuple[Piece, int, int, int]]:
        """``(piece, first, last, shard_start)``: elements ``[first, last)`` of the flattened piece lie at
        ``shard_start`` in the shard.
        """
        ...


def shard_targets(tensors: Iterable[Tensor], shards: Iterable[FlatShard]) -> Iterator[Target]:
    """The boxes of flat tensors: masters, or one optimizer state per shard, laid out as the shards are."""
    for tensor, shard in zip(tensors, shards, strict=True):
        for piece, offset, data in shard_boxes(tensor, shard):
            yield Target(piece.name, piece.shape, offset, data)


def shard_boxes(tensor: Tensor, shard: FlatShard) -> Iterator[tuple[Piece, tuple[int, ...], Tensor]]:
    """A flat tensor as boxes: a flat interval of an n-dim piece becomes a few row-major boxes, all views.

    Yields:
        the piece, the box's offset in the canonical tensor, and its memory in the box's own shape.
    """
    flat = tensor.detach().view(-1)
    for piece, first, last, start in shard.intervals():
        for offset, size, element in boxes(piece.size, first, last):
            position = start + element - first
            data = flat[position : position + prod(size)].view(size)
            yield piece, tuple(a + b for a, b in zip(piece.offset, offset, strict=True)), data
