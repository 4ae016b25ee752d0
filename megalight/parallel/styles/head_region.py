"""Modules that process a share of the attention heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from megalight.errors import LayoutError
from megalight.nn import Attention, RMSNorm
from megalight.nn.canonical import Part
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register
from megalight.parallel.tensor import split
from megalight.parallel.tensor.group_mean import GroupMean


@register
@dataclass(frozen=True)
class HeadRegion(Style):
    """A module that works on this rank's attention heads (QK-norm).

    If all heads share its weights, their gradients are summed over ``tp``. A norm over all heads together
    (``nn.Attention(norm_whole=True)``) has weights of its own for each head: a rank holds those of its heads, and mean
    squares are averaged over ``tp``, one number per token.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module; of a norm over all heads together, keep the part for this rank's heads.

        Raises:
            LayoutError: such a norm is not an ``nn.RMSNorm``, or its heads cannot be distributed.
        """
        around = splitter.model.get_submodule(name.rpartition(".")[0])
        tp = splitter.shared.mesh.tp
        if tp == 1 or not isinstance(around, Attention) or not around.norm_whole:
            # Each rank sees the gradient of its own heads only.
            splitter.keep(name, module, partial=True)
            return
        if not isinstance(module, RMSNorm):
            raise LayoutError(
                f"{name} is a {type(module).__name__} over all heads together, and tp={tp} divides the heads; only an "
                "RMSNorm can be divided. Set norm.kind=rms, attention.qk_norm_whole=false, or tp=1."
            )
        heads = module.weight.shape[0] // around.head_dim

        def rule(parts: Sequence[Part], shape: tuple[int, ...], mesh: ParallelMesh) -> ShardSpec:
            # As the projection divides heads: a key head may be on several ranks. Each head is then on equally many,
            # so the mean over ranks is that over heads.
            return split.output_features(parts, [heads], mesh, shared=True)

        module._parameters["weight"] = splitter.split(name, module, "weight", rule)
        module.average = GroupMean(splitter.shared, tp)
