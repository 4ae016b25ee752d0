"""Modules that read rows of all context-parallel shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from megalight.parallel.collectives import join, split
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class AllRows(Style):
    """A module without parameters, in a model whose ranks along ``cp`` hold equal runs of packed rows.

    It reads the rows of all ranks as its first input, and each rank goes on with its run of the rows that it returns.
    Styles before it in a rule are around it.
    """

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, and add hooks if there are several shares."""
        splitter.keep(name, module)
        shared = splitter.shared
        if shared.mesh.cp == 1:
            return

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return join(args[0], shared.context_groups.all, 0), *args[1:]

        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return split(output, shared.context_groups.all, 0)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, prepend=True)
