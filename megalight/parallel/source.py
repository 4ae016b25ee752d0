"""Sources of values: tensors by canonical name, read lazily, box by box, into the memory of this rank.

A source may be one of our checkpoints or a folder of another library. The caller describes the memory to fill as
:class:`Target` boxes. The source reads these boxes and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import CheckpointError
from megalight.nn.canonical import canonical_tensors
from megalight.parallel.shard import ShardPiece, ShardSpec, boxes


@dataclass(frozen=True)
class Target:
    """Memory of this rank into which a box of a canonical tensor is read.

    Attributes:
        name: canonical name.
        shape: global shape of the canonical tensor.
        offset: start of the box in the canonical tensor, per dim.
        data: the memory, with the box's shape and any dtype: a view of a local parameter or of a flat shard.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True)
class FillReport:
    """Names that a non-strict fill skipped.

    Attributes:
        missing: requested on this rank, but not in the source; unchanged.
        unexpected: in the source under the prefix, but requested by no rank.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class TensorMetadata(Protocol):
    """Metadata of one tensor of a source."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""

    @property
    def dtype(self) -> str:
        """The dtype by torch's name (``bfloat16``)."""


class Source(Protocol):
    """Tensors by canonical name."""

    @property
    def tensors(self) -> Mapping[str, TensorMetadata]:
        """The available tensors."""

    def fill(
        self,
        targets: Iterable[Target],
        *,
        strict: bool = True,
        prefix: str = "",
        process_group: ProcessGroup | None = None,
    ) -> FillReport:
        """Read this rank's boxes, converted to the dtypes of their memory. All ranks of the group call it together.

        Args:
            targets: this rank's boxes.
            strict: names must agree: every target is in the source, and the targets of all ranks together request every
                tensor in it whose name begins with ``prefix``.
            prefix: see ``strict``. One model is one prefix.
            process_group: the ranks that call; None means the default group, or this process alone.

        Raises:
            CheckpointError: names or shapes differ, or a file is damaged. It is raised on every rank, before any memory
                has changed.
        """


@dataclass(frozen=True)
class FillRequest:
    """What one call of :meth:`Source.fill` asks for: its arguments."""

    targets: Sequence[Target]
    strict: bool = True
    prefix: str = ""
    process_group: ProcessGroup | None = None

    def to(self, source: Source) -> FillReport:
        """Ask a source."""
        return source.fill(self.targets, strict=self.strict, prefix=self.prefix, process_group=self.process_group)


@dataclass(frozen=True)
class WrappedSource:
    """A source made of another one. Subclasses change what is asked of it, and see what it has read.

    Attributes:
        source: the source that is read.
    """

    source: Source

    @property
    def tensors(self) -> Mapping[str, TensorMetadata]:
        """The available tensors."""
        return self.source.tensors

    def fill(
        self,
        targets: Iterable[Target],
        *,
        strict: bool = True,
        prefix: str = "",
        process_group: ProcessGroup | None = None,
    ) -> FillReport:
        """See :meth:`Source.fill`."""
        request = FillRequest(list(targets), strict, prefix, process_group)
        passed = self.before(request)
        return self.after(request, passed, self.read(passed))

    def before(self, request: FillRequest) -> FillRequest:
        """Return what is asked of the source in place of ``request``."""
        return request

    def read(self, passed: FillRequest) -> FillReport:
        """Ask the source."""
        return passed.to(self.source)

    def after(self, request: FillRequest, passed: FillRequest, filled: FillReport) -> FillReport:
        """Use what the source has read, and return the names that the caller hears of.

        Args:
            request: what the caller asked for.
            passed: what :meth:`before` made of it.
            filled: what the source answered.
        """
        return filled


@dataclass(frozen=True)
class RenamedSource(WrappedSource):
    """A source seen under another prefix: a teacher (``teacher.``) is filled from tensors saved as ``model.``.

    Tensors whose names do not begin with ``theirs`` are not seen. Errors use the source's own names.

    Attributes:
        ours: the prefix of names for the caller.
        theirs: the prefix of names in the source.
    """

    ours: str
    theirs: str

    @property
    def tensors(self) -> dict[str, TensorMetadata]:
        """The available tensors, by our names."""
        found = self.source.tensors.items()
        return {self._to_ours(name): stored for name, stored in found if name.startswith(self.theirs)}

    def before(self, request: FillRequest) -> FillRequest:
        """See :meth:`WrappedSource.before`."""
        targets = [replace(target, name=self._to_theirs(target.name)) for target in request.targets]
        return replace(request, targets=targets, prefix=self._to_theirs(request.prefix or self.ours))

    def after(self, request: FillRequest, passed: FillRequest, filled: FillReport) -> FillReport:
        """See :meth:`WrappedSource.after`."""
        return FillReport(tuple(map(self._to_ours, filled.missing)), tuple(map(self._to_ours, filled.unexpected)))

    def _to_ours(self, name: str) -> str:
        return self.ours + name.removeprefix(self.theirs)

    def _to_theirs(self, name: str) -> str:
        return self.theirs + name.removeprefix(self.ours)


@dataclass(frozen=True)
class SelectedSource(WrappedSource):
    """Some tensors of a source, perhaps under other names: a model's head alone, or all of it except the head.

    Tensors that were not chosen are not missed.

    Attributes:
        names: our name -> name in the source.
    """

    names: Mapping[str, str]

    @property
    def tensors(self) -> dict[str, TensorMetadata]:
        """The available tensors, by our names."""
        found = self.source.tensors
        return {ours: found[theirs] for ours, theirs in self.names.items() if theirs in found}

    def before(self, request: FillRequest) -> FillRequest:
        """See :meth:`WrappedSource.before`."""
        lost = self._lost()
        # Known on all ranks alike, and before any of them waits for others.
        if request.strict and lost:
            raise CheckpointError(f"the weights lack {self.names[lost[0]]} (and {len(lost) - 1} more tensors).")
        others = self._others(request)
        if request.strict and others:
            raise CheckpointError(f"no tensor was chosen for {others[0]} (and {len(others) - 1} more).")
        known = (target for target in request.targets if target.name in self.names)
        targets = [replace(target, name=self.names[target.name]) for target in known]
        return replace(request, targets=targets, strict=False, prefix="")

    def after(self, request: FillRequest, passed: FillRequest, filled: FillReport) -> FillReport:
        """See :meth:`WrappedSource.after`."""
        return FillReport((*self._lost(), *self._others(request)), ())

    def _others(self, request: FillRequest) -> tuple[str, ...]:
        return tuple(target.name for target in request.targets if target.name not in self.names)

    def _lost(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.names) - self.tensors.keys()))


def model_targets(model: nn.Module, prefix: str = "") -> Iterator[Target]:
    """Yield the parameters of a whole single-device model.

    Args:
        model: not on the meta device.
        prefix: put before every canonical name.
    """
    for name, tensor in canonical_tensors(model).items():
        yield Target(prefix + name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


def parameter_targets(tensors: Iterable[tuple[str, Tensor]], specs: Mapping[str, ShardSpec]) -> Iterator[Target]:
    """Yield the boxes of local parameters and buffers. Padding, which no piece covers, is in none of them.

    Args:
        tensors: local name -> contiguous tensor.
        specs: local name -> the parts of canonical tensors that it holds.
    """
    for name, tensor in tensors:
        # `view`, not `reshape`: a copy would be filled, and the parameter would not change.
        flat = tensor.detach().view(-1)
        for piece in specs[name].pieces:
            yield Target(piece.name, piece.shape, piece.offset, piece.view(flat))


def clear_outside(flat: Tensor, intervals: Iterable[tuple[int, int]]) -> None:
    """Zero the elements of a flat tensor that lie in none of the intervals ``[start, stop)``: its padding."""
    end = 0
    for start, stop in sorted(intervals):
        flat[end:start].zero_()
        end = max(end, stop)
    flat[end:].zero_()


class FlatSource(Protocol):
    """A rank's flat share of parameters or optimizer state, and the position of canonical elements in it.

    Attributes:
        replicas: ranks that hold this same shard; each writes a part to checkpoints.
        place: index of this rank in ``replicas``.
    """

    replicas: tuple[int, ...]
    place: int

    def intervals(self) -> Iterable[tuple[ShardPiece, int, int, int]]:
        """Yield ``(piece, first, last, shard_start)`` for every part of a piece in the shard.

        Elements ``[first, last)`` of the flattened piece lie at ``shard_start`` in the shard.
        """
        ...


def shard_targets(tensors: Iterable[Tensor], shards: Iterable[FlatSource]) -> Iterator[Target]:
    """Yield the boxes of flat tensors: masters, or one optimizer state per shard, with the shards' layout."""
    for tensor, shard in zip(tensors, shards, strict=True):
        for piece, offset, data in shard_boxes(tensor, shard):
            yield Target(piece.name, piece.shape, offset, data)


def shard_boxes(tensor: Tensor, shard: FlatSource) -> Iterator[tuple[ShardPiece, tuple[int, ...], Tensor]]:
    """Yield a flat tensor as boxes: a flat interval of an n-dim piece becomes a few row-major boxes, all views.

    Yields:
        the piece, the box's offset in the canonical tensor, and its memory in the box's own shape.
    """
    flat = tensor.detach().view(-1)
    for piece, first, last, start in shard.intervals():
        for offset, size, element in boxes(piece.size, first, last):
            position = start + element - first
            data = flat[position : position + prod(size)].view(size)
            yield piece, tuple(a + b for a, b in zip(piece.offset, offset, strict=True)), data
