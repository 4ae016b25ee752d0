"""The adapter of a linear layer whose output features are split over ``tp``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megalight.nn.adapter import Adapter
from megalight.parallel.collectives import all_gather, copy
from megalight.parallel.tensor.shared import Shared, Tokens


class ColumnAdapter(Adapter):
    """``A [n r, in]`` is whole on every rank and ``B [out/tp, r]`` is split; what travels is ``r`` features wide.

    Args:
        adapter: the one-device adapter.
        down: ``A``.
        up: this rank's ``B``.
        section_sizes: this rank's output features of each section of the layer.
        shared: what the layers share.
        tokens: which tokens the layer is fed under sequence parallelism.
        dropout: of the layer's input, or None.
    """

    def __init__(
        self,
        adapter: Adapter,
        down: nn.Parameter,
        up: nn.Parameter,
        section_sizes: Sequence[int],
        shared: Shared,
        tokens: Tokens,
        dropout: nn.Module | None,
    ) -> None:
        super().__init__(down, up, adapter.units, section_sizes, adapter.adapted, adapter.scale, dropout)
        self.shared = shared
        self.tokens = tokens

    def meet(self, narrow: Tensor) -> Tensor:
        """``[T/tp, n r] -> [T, n r]`` under sequence parallelism; else gradients of the ranks' outputs are summed."""
        tokens = self.shared.tokens(self.tokens)
        if tokens == "share":
            return all_gather(narrow, self.shared.group, self.shared.sequence_dim)
        return copy(narrow, self.shared.group) if tokens == "whole" else narrow
