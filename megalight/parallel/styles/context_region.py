"""Attention over all shares of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from megalight.nn import InnerAttention
from megalight.parallel.context.attention import ContextAttention
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class ContextRegion(Style):
    """The attention core (``nn.InnerAttention``), which attends to all shares of a sequence under context parallelism.

    The kind (ring, all-gather, ...) is an option of the layout, not of the plan.
    """

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Return a :class:`ContextAttention` if there are several shares."""
        inner = self.expect(name, module, InnerAttention, replaced=self.splits(splitter.shared.mesh))
        shared = splitter.shared
        # Without shares the attention is right as it is, and a wrapper would cost every call.
        if shared.mesh.cp == 1:
            return None
        outer = splitter.model.get_submodule(name.rpartition(".")[0])
        heads = getattr(outer, "heads", None)  # this rank's number: the projection before it is already split
        return ContextAttention(inner, name, shared.context.kind_of(name), shared.context_groups, heads)
