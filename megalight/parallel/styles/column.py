"""Linear layers whose output features are split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from megalight.errors import LayoutError
from megalight.nn import Linear
from megalight.nn.canonical import Part
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.adapters import column_adapters
from megalight.parallel.styles.style import Style, register
from megalight.parallel.tensor import split
from megalight.parallel.tensor.column import ColumnLinear
from megalight.parallel.tensor.shared import Tokens


@register
@dataclass(frozen=True)
class Column(Style):
    """A linear layer whose *output* features are split over ``tp``.

    Attributes:
        units: number of indivisible parts of the output (attention heads). None: the layer's own sections decide, or
            every feature is a unit.
        shared: whether there may be fewer units than ``tp``, so that a group of ``tp / units`` ranks holds each
            (key-value heads). In a fused layer, sections with fewer units than the largest may always be shared.
        gather_output: return the whole output on every rank, so that other modules do not notice the split.
        tokens: the tokens that the layer receives.
    """

    units: int | None = None
    shared: bool = False
    gather_output: bool = False
    tokens: Tokens = "share"

    @property
    def overlaps(self) -> bool:
        """True if the layer gathers tokens from shares."""
        return self.tokens == "share"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module:
        """Return a :class:`ColumnLinear`; a fused layer is split section by section, an adapter with its layer."""
        linear = self.expect(name, module, nn.Linear, Linear, replaced=self.splits(splitter.shared.mesh))
        units = self._units(name, linear, splitter.shared.mesh)

        def rule(parts: Sequence[Part], shape: tuple[int, ...], mesh: ParallelMesh) -> ShardSpec:
            return split.output_features(parts, units, mesh, shared=self.shared)

        weight, bias = (splitter.split(name, linear, local, rule) for local in ("weight", "bias"))
        assert weight is not None
        # Read after the split: of a shared section, a rank holds more rows than its size divided by tp.
        sizes = splitter.sizes(linear.weight)
        layer = ColumnLinear(
            weight,
            bias,
            sizes,
            splitter.shared,
            tokens=self.tokens,
            gather_output=self.gather_output,
            name=name,
        )
        layer.adapter = column_adapters(splitter, name, linear, self.units, sizes, self.tokens)
        return layer

    def _units(self, name: str, linear: nn.Linear | Linear, mesh: ParallelMesh) -> list[int]:
        """Return the number of indivisible parts of each section."""
        rows, sections = linear.weight.shape[0], getattr(linear, "sections", None)
        if self.units is not None and sections:
            raise LayoutError(f"{name} has sections that state their units; leave units={self.units} out of its rule.")
        units = [section.units for section in sections] if sections else [self.units or rows]
        sizes = [section.size for section in sections] if sections else [rows]
        for size, count in zip(sizes, units, strict=True):
            if size % count:
                raise LayoutError(f"{name}: {size} output features cannot consist of {count} equal units.")
        # The outputs of all ranks are laid side by side. A shared unit would occur there several times.
        if self.gather_output and any(count % mesh.tp for count in units):
            raise LayoutError(f"{name}: gather_output needs units ({units}) that tp={mesh.tp} divides; lower tp.")
        return units
