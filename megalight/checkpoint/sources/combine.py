"""Sources made of other sources: their mean, one over another, one without some tensors, one in full precision.

Each takes as much memory as is filled at a time. :class:`TensorSource` is a source of tensors in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.checkpoint.loading import SavedCheckpoint, compare
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.sources.flat import canonical
from megalight.parallel.source import (
    FillReport,
    FillRequest,
    RenamedSource,
    Source,
    Target,
    TensorMetadata,
    WrappedSource,
)

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
