"""A source whose names need not agree with those of the model that it fills."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from megalight.checkpoint.ranks import Ranks
from megalight.parallel.source import Filled, Source, Stored, Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lenient:
    """A source that fills what it has: missing tensors keep their values, and tensors nobody asks for are skipped.

    Attributes:
        source: the source that is read.
        where: what the log calls it.
        say: whether rank 0 logs the name of every tensor that a strict fill misses or skips.
        skipped: names of other stored tensors, which ``source`` itself does not show.
        label: what the log calls a tensor of ``source``.
    """

    source: Source
    where: str
    say: bool
    skipped: tuple[str, ...] = ()
    label: Callable[[str], str] = repr

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """The available tensors."""
        return self.source.tensors

    def fill(
        self,
        targets: Iterable[Target],
        *,
        strict: bool = True,
        prefix: str = "",
        process_group: ProcessGroup | None = None,
    ) -> Filled:
        """See :meth:`megalight.parallel.source.Source.fill`; ``strict`` only decides about the log.

        Raises:
            CheckpointError: shapes differ, or a file is damaged.
        """
        filled = self.source.fill(targets, strict=False, prefix=prefix, process_group=process_group)
        if strict and self.say:
            self._report(filled, Ranks(process_group))
        return Filled(filled.missing, (*filled.unexpected, *self.skipped))

    def _report(self, filled: Filled, ranks: Ranks) -> None:
        # A rank knows only what its own part misses; rank 0 gets the names of all.
        everyone = ranks.together(f"comparing names with {self.where}", lambda: filled.missing)
        if ranks.rank:
            return
        missing = sorted({name for names in everyone for name in names})
        extra = [*map(self.label, filled.unexpected), *map(repr, self.skipped)]
        if missing:
            log.warning(
                "%d tensors are not in %s and keep their initial values: %s",
                len(missing),
                self.where,
                ", ".join(map(self.label, missing)),
            )
        if extra:
            log.warning(
                "%d tensors of %s are not in this model and are skipped: %s", len(extra), self.where, ", ".join(extra)
            )
