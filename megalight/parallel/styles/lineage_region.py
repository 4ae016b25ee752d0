"""Attention of a draft model over all shares of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from megalight.errors import LayoutError
from megalight.nn import LineageAttention
from megalight.parallel.context.lineage import ContextLineageAttention
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class LineageRegion(Style):
    """The attention core of a draft model (``nn.LineageAttention``), whose real tokens lie in all shares."""

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Return a :class:`ContextLineageAttention` if there are several shares.

        Raises:
            LayoutError: another kind than ``all_gather`` is asked for.
        """
        inner = self.expect(name, module, LineageAttention, replaced=self.splits(splitter.shared.mesh))
        shared = splitter.shared
        if shared.mesh.cp == 1:
            return None
        if (kind := shared.context.kind_of(name)) not in ("auto", "all_gather"):
            raise LayoutError(
                f"{name}: context.kind={kind!r} cannot serve the attention of a draft model, which gathers the keys of "
                "the real tokens once. Set kind='all_gather' or 'auto'."
            )
        return ContextLineageAttention(inner, shared.context_groups)
