"""A source without some of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from megalight.parallel.source import Filled, Source, Stored, Target


@dataclass(frozen=True)
class Without:
    """A source in which tensors with certain names are not seen, nor missed by a strict fill.

    Attributes:
        source: the source that is read.
        beginnings: what names of the hidden tensors begin with.
    """

    source: Source
    beginnings: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, Stored]:
        """The other tensors."""
        return {name: stored for name, stored in self.source.tensors.items() if not name.startswith(self.beginnings)}

    def fill(
        self,
        targets: Iterable[Target],
        *,
        strict: bool = True,
        prefix: str = "",
        process_group: ProcessGroup | None = None,
    ) -> Filled:
        """See :meth:`~megalight.parallel.source.Source.fill`."""
        # Read into memory that nobody keeps: a strict source wants all of its tensors to be asked for.
        aside = [
            Target(name, stored.shape, (0,) * len(stored.shape), torch.empty(stored.shape))
            for name, stored in self.source.tensors.items()
            if strict and name.startswith(self.beginnings)
        ]
        filled = self.source.fill([*targets, *aside], strict=strict, prefix=prefix, process_group=process_group)
        return Filled(filled.missing, tuple(name for name in filled.unexpected if not name.startswith(self.beginnings)))
