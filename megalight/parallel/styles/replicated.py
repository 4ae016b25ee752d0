"""Modules that every rank holds whole."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class Replicated(Style):
    """A module that computes the same on every rank: its weights are held whole, and their gradients are complete.

    Without sequence parallelism, modules without a rule are treated like this. With it, every module with parameters
    needs a rule, because it is not known whether it gets a share of the tokens or all of them.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module."""
        splitter.keep(name, module)
