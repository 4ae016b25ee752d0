"""Comparison of hidden states, of which each rank holds a share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalight.nn import StateComparison
from megalight.parallel.expert.pool import MeshPool
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.boundary import Boundary
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class Comparison(Style):
    """A comparison (``nn.StateComparison``): each rank compares its share of the tokens, and gets all losses.

    Its first input are the teacher's states of all tokens, its second one this rank's share of the student's.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, and add hooks."""
        found: StateComparison = self.expect(name, module, StateComparison)
        splitter.keep(name, found, partial=splitter.shared.sequence_parallel)
        found.pool = MeshPool(splitter.shared)
        Boundary(enter="split", leave="join").add_to(found, splitter.shared)
