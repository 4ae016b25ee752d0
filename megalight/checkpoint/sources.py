"""Sources of tensors beside checkpoint folders: flat mappings, and sources that combine, rename or rewrite others."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.checkpoint.boxes import intersection
from megalight.checkpoint.disk.index import TensorInfo
from megalight.checkpoint.disk.manifest import DP_RESHARDABLE
from megalight.checkpoint.loading import Checkpoint, SavedCheckpoint, compare
from megalight.checkpoint.loading import open as open_checkpoint
from megalight.checkpoint.ranks import Ranks, alone
from megalight.checkpoint.saving import save
from megalight.checkpoint.view import View, piece_name, views_of_source
from megalight.errors import CheckpointError
from megalight.parallel.source import (
    FillReport,
    FillRequest,
    RenamedSource,
    Source,
    Target,
    TensorMetadata,
    WrappedSource,
)

_PIECE = re.compile(r"(?P<name>.+)@(?P<offset>[\d,]*)\+(?P<size>[\d,]*)")


def canonical(saved: SavedCheckpoint) -> Source:
    """Return a checkpoint as a source of canonical tensors, whatever scheme wrote it."""
    return FlatStates(saved) if isinstance(saved, Checkpoint) and saved.scheme == DP_RESHARDABLE else saved


@dataclass(frozen=True)
class FlattenedTensor:
    """A canonical tensor that is stored in flattened pieces.

    Attributes:
        dtype: torch's name of its dtype.
        pieces: offset and size of each piece.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class FlatStates(WrappedSource):
    """A checkpoint of the scheme ``dp_reshardable`` as a source of canonical tensors.

    A fill reads the whole of each piece that a box touches: this is for one process that converts, not for training.
    """

    source: Checkpoint

    @cached_property
    def wholes(self) -> dict[str, FlattenedTensor]:
        """The tensors that are stored in pieces.

        Raises:
            CheckpointError: the pieces of a tensor do not cover it.
        """
        found: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], TensorInfo]]] = {}
        for name, info in self.source.tensors.items():
            match = _PIECE.fullmatch(name)
            if match is not None:
                found.setdefault(match["name"], []).append((_numbers(match["offset"]), _numbers(match["size"]), info))
        wholes = {}
        for name, parts in found.items():
            ends = [[o + n for o, n in zip(offset, size, strict=True)] for offset, size, _ in parts]
            # Pieces have offsets. Their ends give the shape of the whole.
            shape = tuple(map(max, zip(*ends, strict=True)))
            if sum(prod(size) for _, size, _ in parts) != prod(shape) or any(
                info.shape != (prod(size),) for _, size, info in parts
            ):
                raise CheckpointError(f"checkpoint {self.source.path} is malformed: the pieces of {name!r} do not fit.")
            wholes[name] = FlattenedTensor(shape, parts[0][2].dtype, tuple((offset, size) for offset, size, _ in parts))
        return wholes

    @property
    def tensors(self) -> Mapping[str, TensorMetadata]:
        """The available tensors, by canonical name."""
        others = {name: info for name, info in self.source.tensors.items() if not _PIECE.fullmatch(name)}
        return {**others, **self.wholes}

    def read(self, passed: FillRequest) -> FillReport:
        """See :meth:`~megalight.parallel.source.WrappedSource.read`."""
        boxes, group = passed.targets, passed.process_group
        asked = {box.name: box.shape for box in boxes}
        where = f"checkpoint {self.source.path}"
        filled = compare(Ranks(group), where, self.tensors, asked, strict=passed.strict, prefix=passed.prefix)
        plain = [box for box in boxes if box.name not in self.wholes]
        touched: dict[str, Tensor] = {}
        overlaps = []
        for box in boxes:
            # Tensors that are not in pieces are filled as they are.
            for offset, size in self.wholes[box.name].pieces if box.name in self.wholes else ():
                found = intersection(box.offset, box.data.shape, offset, size)
                if found is not None:
                    mine, inside = found
                    name = piece_name(box.name, offset, size)
                    # Once for all boxes that touch the piece.
                    touched.setdefault(name, torch.empty(prod(size), dtype=box.data.dtype))
                    overlaps.append((name, size, box.data[mine], inside))
        flat = [Target(name, (len(data),), (0,), data) for name, data in touched.items()]
        # One fill for all, so that files are opened once.
        self.source.fill([*plain, *flat], strict=False, process_group=group)
        for name, size, part, inside in overlaps:
            part.copy_(touched[name].view(size)[inside])
        return filled


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


log = logging.getLogger(__name__)

MASTER = "optimizer.master."
"""Prefix of master weights that are copies; the name of the weight follows."""

WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class AveragedSource(WrappedSource):
    """The mean of several sources with equal tensors. Floating-point values are added in float32, or wider.

    Tensors of other dtypes (counters, masks) are those of the first source.

    Attributes:
        others: the sources besides the first one.
    """

    others: Sequence[Source]

    def after(self, request: FillRequest, passed: FillRequest, filled: FillReport) -> FillReport:
        """See :meth:`~megalight.parallel.source.WrappedSource.after`."""
        # Once: a source made of others may list its names again each time.
        floats = {name for name, held in self.tensors.items() if getattr(torch, held.dtype).is_floating_point}
        floating = [box for box in request.targets if box.name in floats]
        total: list[Target] = []
        for source in (self.source, *self.others):
            # The first is read again, too: its values may have been rounded to the boxes' dtype, and a sum of half
            # values would lose digits.
            parts = [replace(box, data=_wide(box.data)) for box in floating]
            source.fill(parts, strict=False, process_group=request.process_group)
            # Empty in the first turn, whose parts become the sum.
            for sum_, part in zip(total, parts, strict=False):
                sum_.data.add_(part.data)
            total = total or parts
        for box, sum_ in zip(floating, total, strict=True):
            # Divided before it is rounded to the box's dtype.
            box.data.copy_(sum_.data.div_(1 + len(self.others)))
        return filled


def _wide(data: Tensor) -> Tensor:
    return torch.zeros(data.shape, dtype=torch.promote_types(data.dtype, torch.float32))


@dataclass(frozen=True)
class OverlaySource(WrappedSource):
    """A source whose tensors are read from ``over`` where that has them."""

    over: Source

    def after(self, request: FillRequest, passed: FillRequest, filled: FillReport) -> FillReport:
        """See :meth:`~megalight.parallel.source.WrappedSource.after`."""
        held = self.over.tensors
        # Only its own tensors; all else stays as the source below has filled it.
        boxes = [box for box in request.targets if box.name in held]
        self.over.fill(boxes, strict=False, process_group=request.process_group)
        return filled


@dataclass(frozen=True)
class UnionSource(WrappedSource):
    """The union of two sources. Names that both have are read from ``other``."""

    other: Source

    @property
    def tensors(self) -> Mapping[str, TensorMetadata]:
        """The available tensors."""
        return {**self.source.tensors, **self.other.tensors}

    def before(self, request: FillRequest) -> FillRequest:
        """See :meth:`~megalight.parallel.source.WrappedSource.before`."""
        held = self.other.tensors
        return replace(request, targets=[box for box in request.targets if box.name not in held])

    def after(self, request: FillRequest, passed: FillRequest, filled: FillReport) -> FillReport:
        """See :meth:`~megalight.parallel.source.WrappedSource.after`."""
        held = self.other.tensors
        other = replace(request, targets=[box for box in request.targets if box.name in held]).to(self.other)
        return FillReport(filled.missing, (*filled.unexpected, *other.unexpected))


@dataclass(frozen=True)
class WatchedSource(WrappedSource):
    """A source that reports how many elements each fill has read."""

    report: Callable[[int], None]

    def after(self, request: FillRequest, passed: FillRequest, filled: FillReport) -> FillReport:
        """See :meth:`~megalight.parallel.source.WrappedSource.after`."""
        self.report(sum(box.data.numel() for box in request.targets))
        return filled


@dataclass(frozen=True)
class TensorSource:
    """Whole tensors in memory, by canonical name. ``where`` they come from is for messages."""

    values: Mapping[str, Tensor]
    where: str = "memory"

    @property
    def tensors(self) -> Mapping[str, TensorMetadata]:
        """The available tensors."""
        return {
            name: _TensorInMemory(tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for name, t in self.values.items()
        }

    def fill(
        self,
        targets: Iterable[Target],
        *,
        strict: bool = True,
        prefix: str = "",
        process_group: ProcessGroup | None = None,
    ) -> FillReport:
        """See :meth:`megalight.parallel.source.Source.fill`."""
        boxes = list(targets)
        asked = {box.name: box.shape for box in boxes}
        filled = compare(Ranks(process_group), self.where, self.tensors, asked, strict=strict, prefix=prefix)
        for box in boxes:
            if box.name in self.values:
                # A box is a part of the tensor: its offset and size say which.
                place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.data.shape, strict=True))
                box.data.copy_(self.values[box.name][place])
        return filled


@dataclass(frozen=True)
class _TensorInMemory:
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ExcludingSource(WrappedSource):
    """A source in which tensors with certain names are not seen, nor missed by a strict fill.

    Attributes:
        prefixes: prefixes of the hidden tensors.
    """

    prefixes: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, TensorMetadata]:
        """The other tensors."""
        return {name: stored for name, stored in self.source.tensors.items() if not self._hides(name)}

    def before(self, request: FillRequest) -> FillRequest:
        """See :meth:`~megalight.parallel.source.WrappedSource.before`."""
        # Read into memory that nobody keeps: a strict source wants all of its tensors to be asked for.
        hidden = [
            Target(name, stored.shape, (0,) * len(stored.shape), torch.empty(stored.shape))
            for name, stored in self.source.tensors.items()
            if request.strict and self._hides(name)
        ]
        return replace(request, targets=[*request.targets, *hidden])

    def after(self, request: FillRequest, passed: FillRequest, filled: FillReport) -> FillReport:
        """See :meth:`~megalight.parallel.source.WrappedSource.after`."""
        return FillReport(filled.missing, tuple(name for name in filled.unexpected if not self._hides(name)))

    def _hides(self, name: str) -> bool:
        return name.startswith(self.prefixes)


@dataclass(frozen=True)
class LenientSource(WrappedSource):
    """A source that fills what it has: missing tensors keep their values, and tensors nobody asks for are skipped.

    Attributes:
        where: what the log calls it.
        say: whether rank 0 logs the name of every tensor that a strict fill misses or skips.
        skipped: names of other stored tensors, which ``source`` itself does not show.
        label: what the log calls a tensor of ``source``.
    """

    where: str
    say: bool
    skipped: tuple[str, ...] = ()
    label: Callable[[str], str] = repr

    def before(self, request: FillRequest) -> FillRequest:
        """See :meth:`~megalight.parallel.source.WrappedSource.before`. ``strict`` only decides about the log."""
        return replace(request, strict=False)

    def after(self, request: FillRequest, passed: FillRequest, filled: FillReport) -> FillReport:
        """See :meth:`~megalight.parallel.source.WrappedSource.after`."""
        if request.strict and self.say:
            self._report(filled, Ranks(request.process_group))
        return FillReport(filled.missing, (*filled.unexpected, *self.skipped))

    def _report(self, filled: FillReport, ranks: Ranks) -> None:
        # A rank knows only what its own part misses; rank 0 gets the names of all.
        everyone = ranks.together(f"comparing names with {self.where}", lambda: filled.missing)
        if ranks.rank:
            return
        missing = sorted({name for names in everyone for name in names})
        report(self.where, self.label, missing, [*map(self.label, filled.unexpected), *map(repr, self.skipped)])


def report(where: str, label: Callable[[str], str], missing: Sequence[str], extra: Sequence[str]) -> None:
    """Log the names that a model and the weights in ``where`` do not share; ``extra``: as they are to be logged."""
    if missing:
        log.warning(
            "%d tensors are not in %s and keep their initial values: %s",
            len(missing),
            where,
            ", ".join(map(label, missing)),
        )
    if extra:
        log.warning("%d tensors of %s are not in this model and are skipped: %s", len(extra), where, ", ".join(extra))


@dataclass(frozen=True)
class FullPrecision(WrappedSource):
    """A checkpoint as a :class:`~megalight.parallel.source.Source` of weights in full precision.

    Boxes in float32 or wider are read from the master weights if the checkpoint has them, all others from the weights.
    """

    source: SavedCheckpoint

    def after(self, request: FillRequest, passed: FillRequest, filled: FillReport) -> FillReport:
        """See :meth:`~megalight.parallel.source.WrappedSource.after`."""
        # Flat masters are seen as whole ones first, so that both schemes serve.
        masters = RenamedSource(canonical(self.source), request.prefix, MASTER + request.prefix)
        # A run in float32 has no masters: its weights are exact already.
        if masters.tensors:
            wide = [target for target in request.targets if target.data.dtype in WIDE]
            masters.fill(wide, strict=False, process_group=request.process_group)
        return filled


WEIGHTS = "model."
"""Prefix of weights; names of optimizer state have others."""


def rewrite(
    path: str | os.PathLike[str], output: str | os.PathLike[str], scheme: str, watched: Callable[[Source], Source]
) -> None:
    """Write everything in a checkpoint again by another scheme. One process calls it.

    Weights, optimizer state, random states of all ranks and files are kept, so that a run resumes from the result as
    from the original. At most ``BUDGET`` bytes of :mod:`~megalight.checkpoint.view`, or one tensor, are in
    memory at a time.

    Args:
        scheme: the format to write. Flat state (``dp_reshardable``) is written for weights that are not split.
        watched: takes the source of all tensors, and returns one that reports what is read.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or ``output`` cannot be written.
    """
    opened = open_checkpoint(path)
    source = watched(canonical(opened))
    # All ranks that saved it, though one process writes: their random states must not be lost.
    states = {rank: opened.rank_state(rank) for rank in range(opened.world_size)}
    # One process of a larger run may call this, so it must not wait for the others.
    with alone() as group:
        save(
            output,
            _views(source, scheme, group),
            common=opened.common,
            other_ranks={rank: state for rank, state in states.items() if state is not None},
            files={name: opened.file(name) for name in opened.files},
            scheme=scheme,
            process_group=group,
        )


def _views(source: Source, scheme: str, group: ProcessGroup | None) -> dict[str, View]:
    """One view per tensor; the flat scheme's states are flattened, as a run without tensor parallelism holds them."""
    # Weights stay canonical in every scheme; only states differ.
    flat: dict[bool, list[str]] = {False: [], True: []}
    for name in source.tensors:
        flat[scheme == DP_RESHARDABLE and not name.startswith(WEIGHTS)].append(name)
    return {
        **views_of_source(source, flat[False], None, group),
        **views_of_source(source, flat[True], None, group, flat=True),
    }
