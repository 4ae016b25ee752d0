"""A source without some of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megalight.parallel.source import Filled, Request, Stored, Target, Wrapped


@dataclass(frozen=True)
class Without(Wrapped):
    """A source in which tensors with certain names are not seen, nor missed by a strict fill.

    Attributes:
        beginnings: what names of the hidden tensors begin with.
    """

    beginnings: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, Stored]:
        """The other tensors."""
        return {name: stored for name, stored in self.source.tensors.items() if not self._hides(name)}

    def before(self, request: Request) -> Request:
        """See :meth:`~megalight.parallel.source.Wrapped.before`."""
        # Read into memory that nobody keeps: a strict source wants all of its tensors to be asked for.
        aside = [
            Target(name, stored.shape, (0,) * len(stored.shape), torch.empty(stored.shape))
            for name, stored in self.source.tensors.items()
            if request.strict and self._hides(name)
        ]
        return replace(request, targets=[*request.targets, *aside])

    def after(self, request: Request, passed: Request, filled: Filled) -> Filled:
        """See :meth:`~megalight.parallel.source.Wrapped.after`."""
        return Filled(filled.missing, tuple(name for name in filled.unexpected if not self._hides(name)))

    def _hides(self, name: str) -> bool:
        return name.startswith(self.beginnings)
