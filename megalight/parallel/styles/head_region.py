"""Modules that process a share of the attention heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class HeadRegion(Style):
    """A module that works on this rank's attention heads (QK-norm): its weights' gradients are summed over ``tp``."""

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module."""
        splitter.keep(name, module, partial=True)
