"""Norms over groups of features that ranks divide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from megalight.nn.canonical import Part
from megalight.nn.mamba2 import GatedNorm
from megalight.parallel.degrees import replicas_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register
from megalight.parallel.tensor import split
from megalight.parallel.tensor.group_mean import GroupMean


@register
@dataclass(frozen=True)
class NormGroups(Style):
    """A norm over groups of features (``nn.mamba2.GatedNorm``): each rank holds whole groups, or an equal part of one.

    In the second case, mean squares are averaged over the ranks that hold a group, in both passes: one number per token
    and group. Use it after a layer with the style :class:`~.column.Column`, which provides all tokens of the features.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, with a part of its features.

        Raises:
            LayoutError: ``tp`` neither divides the groups, nor is a multiple of them that divides the features.
        """
        norm = self.expect(name, module, GatedNorm)
        features, mesh = norm.weight.shape[0], splitter.shared.mesh
        ranks = replicas_of(features // norm.group_size, mesh.tp, f"{name}.weight")

        def rule(parts: Sequence[Part], shape: tuple[int, ...], mesh: ParallelMesh) -> ShardSpec:
            # Single features are units: a rank may hold a part of a group.
            return split.output_features(parts, [features], mesh)

        norm._parameters["weight"] = splitter.split(name, norm, "weight", rule)
        if ranks > 1:
            norm.group_size //= ranks
            norm.average = GroupMean(splitter.shared, ranks)
