"""Heads that need all tokens of a sequence, under context parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from megalight.nn.mamba2 import AllTokens
from megalight.parallel.context.heads import HeadShare
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class HeadExchange(Style):
    """The place in a mixer where all tokens of a sequence meet (``AllTokens`` of ``nn.Mamba2``).

    Ranks exchange their tokens for heads there, whichever kind attention uses.
    """

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Return a :class:`HeadShare` if there are several shares."""
        self.expect(name, module, AllTokens, replaced=self.splits(splitter.shared.mesh))
        if splitter.shared.mesh.cp == 1:
            return None
        # this rank's number: the projection before it is already split
        heads = splitter.model.get_submodule(name.rpartition(".")[0]).heads
        return HeadShare(name, splitter.shared.context_groups, heads)  # type: ignore[arg-type]
