"""A source whose names need not agree with those of the model that it fills."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megalight.checkpoint.ranks import Ranks
from megalight.parallel.source import Filled, Request, Wrapped

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lenient(Wrapped):
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

    def before(self, request: Request) -> Request:
        """See :meth:`~megalight.parallel.source.Wrapped.before`. ``strict`` only decides about the log."""
        return replace(request, strict=False)

    def after(self, request: Request, passed: Request, filled: Filled) -> Filled:
        """See :meth:`~megalight.parallel.source.Wrapped.after`."""
        if request.strict and self.say:
            self._report(filled, Ranks(request.process_group))
        return Filled(filled.missing, (*filled.unexpected, *self.skipped))

    def _report(self, filled: Filled, ranks: Ranks) -> None:
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
