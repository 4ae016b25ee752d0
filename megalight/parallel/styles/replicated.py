"""Modules that every rank holds whole."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class Replicated(Style):
    """A module that computes the same on every rank: its weights are held whole and their gradients are complete.

    Without sequence parallelism this is what no rule means. With it, a module with parameters must have a rule: whether
    it sees a share of the tokens or all of them cannot be guessed.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """The module stays."""
        splitter.keep(name, module)
