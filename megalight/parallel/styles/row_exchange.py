"""Attention between rows of images that context-parallel ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from megalight.nn import InnerAttention
from megalight.parallel.context.image_rows import RowAttention
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class RowExchange(Style):
    """The attention core (``nn.InnerAttention``) of a model whose ranks along ``cp`` hold equal runs of packed rows."""

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Return a :class:`RowAttention` if there are several shares."""
        inner = self.expect(name, module, InnerAttention, replaced=self.splits(splitter.shared.mesh))
        if splitter.shared.mesh.cp == 1:
            return None
        # This rank's number: the projection before it is already split.
        heads = splitter.model.get_submodule(name.rpartition(".")[0]).heads
        return RowAttention(inner, name, splitter.shared.context_groups, heads)  # type: ignore[arg-type]
