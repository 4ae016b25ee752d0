"""Modules that process every channel separately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from megalight.errors import LayoutError
from megalight.nn.canonical import Part
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register
from megalight.parallel.tensor import split


@register
@dataclass(frozen=True)
class Channels(Style):
    """A module whose parameters have one row per channel (a depthwise convolution); each rank holds its channels' rows.

    Use it after a layer with the style :class:`~.column.Column`, which provides all tokens of these channels.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, with fewer rows.

        Raises:
            LayoutError: ``tp`` does not divide the channels, or the module does not state its initial values.
        """
        stated = getattr(module, "initializers", {})

        def rule(parts: Sequence[Part], shape: tuple[int, ...], mesh: ParallelMesh) -> ShardSpec:
            return split.along(parts[0], 0, mesh)

        for local, parameter in module._parameters.items():
            if parameter is not None and local not in stated:
                raise LayoutError(
                    f"{name} ({type(module).__name__}) does not state how {local} is drawn, so a rank cannot draw its "
                    "rows alone; give the module an attribute `initializers`, as megalight.nn.CausalConv has it."
                )
            module._parameters[local] = splitter.split(name, module, local, rule)
