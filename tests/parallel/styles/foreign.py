"""A style that another package might bring: nothing of it is known to ``megalight``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from megalight.nn.canonical import CanonicalPart
from megalight.parallel.collectives import copy, join
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardPiece, ShardSpec
from megalight.parallel.styles import Style, register
from megalight.parallel.styles.style import Splitter


class SplitPair(nn.Module):
    def __init__(self, weight: nn.Parameter, mesh: ParallelMesh, axis: str) -> None:
        super().__init__()
        self.weight, self.mesh, self.axis = weight, mesh, axis

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        group = self.mesh.group(self.axis)
        return join(F.bilinear(copy(x, group), copy(y, group), self.weight), group, x.dim() - 1)


@dataclass(frozen=True)
class Pair(Style):
    """``nn.Bilinear`` without bias: dim 0 of its weight ``[out, a, b]`` is split, outputs are gathered."""

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module:
        bilinear = self.expect(name, module, nn.Bilinear)

        def rule(parts: Sequence[CanonicalPart], shape: tuple[int, ...], mesh: ParallelMesh) -> ShardSpec:
            size = (shape[0] // mesh.size(self.axis), *shape[1:])
            piece = ShardPiece(parts[0].name, shape, (mesh.rank(self.axis) * size[0], 0, 0), size)
            return ShardSpec((piece,), size)

        weight = splitter.split(name, bilinear, "weight", rule)
        assert weight is not None
        return SplitPair(weight, splitter.shared.mesh, self.axis)


@dataclass(frozen=True)
class ContextPair(Pair):
    """The same over another axis."""

    axis: ClassVar[str] = "cp"


def plugin() -> None:
    """What the package's entry point would call."""
    register(Pair)
    register(ContextPair)
