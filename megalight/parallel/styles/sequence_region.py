"""Modules that process a share of the tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.boundary import Boundary
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class SequenceRegion(Style):
    """A module that works on its rank's share of the tokens when sequence parallelism is on.

    Its weights see a part of the tokens, so their gradients are summed over ``tp``.

    Attributes:
        split_input: the module gets whole-sequence inputs (position ids, for example), and takes its share of the
            first.
    """

    split_input: bool = False

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module."""
        # Without sequence parallelism all ranks see all tokens and compute the whole gradient alike: no sum is due.
        splitter.keep(name, module, partial=splitter.shared.sequence_parallel)
        # With the hooks of a boundary, so that ids and hidden states are cut alike.
        if self.split_input:
            Boundary(enter="split").add_to(module, splitter.shared)
