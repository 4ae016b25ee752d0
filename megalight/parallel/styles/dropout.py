"""Dropout with the correct random stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalight.errors import LayoutError
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register
from megalight.parallel.tensor.dropout import OwnStream, ParallelDropout, has_dropout


@register
@dataclass(frozen=True)
class Dropout(Style):
    """Dropout that uses the rank's own random stream if its input differs between ``tp`` ranks.

    Attributes:
        split: the input differs even without sequence parallelism (attention weights of this rank's heads).
    """

    split: bool = False

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Return a :class:`ParallelDropout` for ``nn.Dropout``, and a wrapper for other modules that draw."""
        if isinstance(module, nn.Dropout):
            self.expect(name, module, nn.Dropout, replaced=self.splits(splitter.shared.mesh))
            return ParallelDropout(module.p, splitter.shared, split=self.split)
        # A wrapper would hide the parameters from the rules for their modules.
        if next(module.parameters(), None) is not None:
            raise LayoutError(
                f"the plan's rule Dropout meets {name}, a {type(module).__name__} with parameters; it is for "
                "nn.Dropout and modules without any."
            )
        # Without dropout inside there is nothing to draw.
        return OwnStream(module, splitter.shared) if self.split and has_dropout(module) else None
