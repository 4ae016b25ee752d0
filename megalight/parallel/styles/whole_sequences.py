"""Mixers that no share of a sequence is enough for."""

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
    """A mixer that must see all tokens of a sequence: context parallelism, which cuts sequences, is refused."""

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """The module stays.

        Raises:
            LayoutError: ranks hold shares of the sequences.
        """
        cp = splitter.shared.mesh.cp
        if cp > 1:
            raise LayoutError(
                f"{name} ({type(module).__name__}) needs whole sequences, and cp={cp} gives each rank a share of every "
                "one. Set context_parallel=1 (tensor and pipeline parallelism serve such layers)."
            )
        splitter.keep(name, module)
