"""Sources made of other sources: a mean, one laid over another, one that is watched; and one made of tensors.

Those made of other sources hold as much memory as is filled at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.checkpoint.compare import compare
from megalight.checkpoint.ranks import Ranks
from megalight.parallel.source import Filled, Request, Source, Stored, Target, Wrapped


@dataclass(frozen=True)
class Averaged(Wrapped):
    """The mean of several sources with equal tensors. Floating-point values are added in float32, or wider.

    Tensors of other dtypes (counters, masks) are those of the first source.

    Attributes:
        others: the sources besides the first one.
    """

    others: Sequence[Source]

    def after(self, request: Request, passed: Request, filled: Filled) -> Filled:
        """See :meth:`~megalight.parallel.source.Wrapped.after`."""
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
class Overlaid(Wrapped):
    """A source whose tensors are read from ``over`` where that has them."""

    over: Source

    def after(self, request: Request, passed: Request, filled: Filled) -> Filled:
        """See :meth:`~megalight.parallel.source.Wrapped.after`."""
        held = self.over.tensors
        # Only its own tensors; all else stays as the source below has filled it.
        boxes = [box for box in request.targets if box.name in held]
        self.over.fill(boxes, strict=False, process_group=request.process_group)
        return filled


@dataclass(frozen=True)
class Joined(Wrapped):
    """A source with the tensors of another one beside its own. Names that both have are read from ``beside``."""

    beside: Source

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """The available tensors."""
        return {**self.source.tensors, **self.beside.tensors}

    def before(self, request: Request) -> Request:
        """See :meth:`~megalight.parallel.source.Wrapped.before`."""
        held = self.beside.tensors
        return replace(request, targets=[box for box in request.targets if box.name not in held])

    def after(self, request: Request, passed: Request, filled: Filled) -> Filled:
        """See :meth:`~megalight.parallel.source.Wrapped.after`."""
        held = self.beside.tensors
        other = replace(request, targets=[box for box in request.targets if box.name in held]).to(self.beside)
        return Filled(filled.missing, (*filled.unexpected, *other.unexpected))


@dataclass(frozen=True)
class Watched(Wrapped):
    """A source that reports how many elements each fill has read."""

    report: Callable[[int], None]

    def after(self, request: Request, passed: Request, filled: Filled) -> Filled:
        """See :meth:`~megalight.parallel.source.Wrapped.after`."""
        self.report(sum(box.data.numel() for box in request.targets))
        return filled


@dataclass(frozen=True)
class Held:
    """Whole tensors in memory, by canonical name. ``where`` they come from is for messages."""

    values: Mapping[str, Tensor]
    where: str = "memory"

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """The available tensors."""
        return {name: _Held(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in self.values.items()}

    def fill(
        self,
        targets: Iterable[Target],
        *,
        strict: bool = True,
        prefix: str = "",
        process_group: ProcessGroup | None = None,
    ) -> Filled:
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
class _Held:
    shape: tuple[int, ...]
    dtype: str
