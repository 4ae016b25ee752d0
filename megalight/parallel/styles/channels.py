"""Modules that process every channel, or every group of channels, separately."""

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

    If the module states ``sections``, each is divided on its own, in whole units. With ``group_size``, groups stay
    whole. Use it after a layer with the style :class:`~.column.Column`, which provides all tokens of these channels.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, with fewer rows.

        Raises:
            LayoutError: ``tp`` does not divide the channels, or the module does not state its initial values.
        """
        stated = getattr(module, "initializers", {})
        sections, group = getattr(module, "sections", None), getattr(module, "group_size", 1)

        def rule(parts: Sequence[Part], shape: tuple[int, ...], mesh: ParallelMesh) -> ShardSpec:
            units = [section.units for section in sections] if sections else [shape[0] // group]
            return split.output_features(parts, units, mesh)

        for local, parameter in module._parameters.items():
            if parameter is not None and local not in stated:
                raise LayoutError(
                    f"{name} ({type(module).__name__}) does not state how {local} is drawn, so a rank cannot draw its "
                    "rows alone; give the module an attribute `initializers`, as megalight.nn.CausalConv has it."
                )
            module._parameters[local] = splitter.split(name, module, local, rule)
