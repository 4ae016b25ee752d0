"""Mixers that need whole sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from megalight.errors import LayoutError
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class WholeSequences(Style):
    """A mixer that needs all tokens of a sequence, so context parallelism, which cuts sequences, raises an error."""

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module.

        Raises:
            LayoutError: ranks hold shares of the sequences.
        """
        cp = splitter.shared.mesh.cp
        # A state runs through the sequence: every share but the first would begin from zeros.
        if cp > 1:
            raise LayoutError(
                f"{name} ({type(module).__name__}) needs whole sequences, and cp={cp} gives each rank a share of every "
                "one. Set context_parallel=1 (tensor and pipeline parallelism serve such layers)."
            )
        splitter.keep(name, module)
