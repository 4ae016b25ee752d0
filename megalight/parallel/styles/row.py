"""Linear layers whose input features are split."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalight.errors import LayoutError
from megalight.nn import Linear
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.adapters import row_adapters
from megalight.parallel.styles.style import Style, register
from megalight.parallel.tensor import split
from megalight.parallel.tensor.row import RowLinear


@register
@dataclass(frozen=True)
class Row(Style):
    """A linear layer whose *input* features are split over ``tp``; outputs are summed, the bias is added once.

    Under sequence parallelism each rank gets the sum for its share of the tokens.
    """

    @property
    def overlaps(self) -> bool:
        """True: the layer sums its outputs over ranks."""
        return True

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module:
        """Return a :class:`RowLinear`; an adapter is split with its layer."""
        linear = self.expect(name, module, nn.Linear, Linear, replaced=self.splits(splitter.shared.mesh))
        # Each rank adds the bias to its own tokens, so its gradient is one term of a sum. Otherwise all ranks have all
        # of it.
        partial = splitter.shared.sequence_parallel
        # Sections divide output features, and each rank has terms of all of these.
        if getattr(linear, "sections", None):
            raise LayoutError(f"{name} has sections of output features, but its rule Row splits the input; use Column.")
        weight = splitter.split(name, linear, "weight", lambda parts, shape, mesh: split.along(parts[0], 1, mesh))
        bias = splitter.split(
            name, linear, "bias", lambda parts, shape, mesh: split.replicated(parts, shape, mesh, partial=partial)
        )
        assert weight is not None
        layer = RowLinear(weight, bias, splitter.shared, name)
        layer.adapter = row_adapters(splitter, name, linear)
        return layer
