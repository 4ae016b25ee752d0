"""Modules that process a share of the attention heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalight.errors import LayoutError
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class HeadRegion(Style):
    """A module that works on this rank's attention heads (QK-norm): its weights' gradients are summed over ``tp``."""

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module; a norm over all heads together is refused, as no rank has all of them."""
        around = splitter.model.get_submodule(name.rpartition(".")[0])
        if splitter.shared.mesh.tp > 1 and getattr(around, "norm_whole", False):
            raise LayoutError(
                f"{name} normalises the features of all heads together, and tp={splitter.shared.mesh.tp} divides the "
                "heads. Set tp=1; experts may still be divided."
            )
        # The weights are shared by all heads, and each rank sees the gradient of its own heads only.
        splitter.keep(name, module, partial=True)
