"""The adapters of linear layers whose output or input features are split over ``tp``; of experts over ``etp``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megalight.nn.adapter import Adapter
from megalight.nn.moe.adapters import StackAdapter
from megalight.parallel.collectives import all_gather, all_reduce, copy
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.tensor.shared import Shared, Tokens


class ColumnAdapter(Adapter):
    """An adapter with ``A [n r, in]`` whole on every rank and ``B [out/tp, r]`` split; ``r`` features are communicated.

    Args:
        adapter: the one-device adapter.
        down: ``A``.
        up: this rank's ``B``.
        section_sizes: this rank's output features of each section of the layer.
        shared: the state that all tensor-parallel layers share.
        tokens: the tokens that the layer receives under sequence parallelism.
        dropout: applied to the layer's input, or None.
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
        """``[T/tp, n r] -> [T, n r]`` under sequence parallelism; otherwise all-reduce the gradient in the backward."""
        # The collective acts on the `r` features between A and B, not on the layer's input: B's ranks need all tokens
        # of these.
        tokens = self.shared.tokens(self.tokens)
        if tokens == "share":
            return all_gather(narrow, self.shared.group, self.shared.sequence_dim)
        # Each rank's B sees part of the outputs, so the gradient of the narrow features is a sum over ranks.
        return copy(narrow, self.shared.group) if tokens == "whole" else narrow


class RowAdapter(Adapter):
    """An adapter with ``A [r, in/tp]`` split and ``B [out, r]`` whole on every rank. The layer sums over ranks.

    Args:
        adapter: the one-device adapter.
        down: this rank's ``A``.
        up: ``B``.
        shared: the state that all tensor-parallel layers share.
        dropout: applied to the layer's input, or None.
    """

    def __init__(
        self, adapter: Adapter, down: nn.Parameter, up: nn.Parameter, shared: Shared, dropout: nn.Module | None
    ) -> None:
        super().__init__(down, up, adapter.units, adapter.section_sizes, adapter.adapted, adapter.scale, dropout)
        self.shared = shared

    def total(self, squares: Tensor) -> Tensor:
        """Sum over the ranks, which hold different input features of each row."""
        return all_reduce(squares, self.shared.group)


class RowStackAdapter(StackAdapter):
    """An adapter of ``down`` of stacked experts, with ``A [E, r, in/etp]`` split and ``B [E, out, r]`` whole.

    Args:
        adapter: the one-device adapter.
        mesh: the mesh of ranks.
    """

    def __init__(self, adapter: StackAdapter, mesh: ParallelMesh) -> None:
        super().__init__(adapter.A, adapter.B, adapter.scale, inner=1)
        self.magnitude = adapter.magnitude
        self.mesh = mesh

    def total(self, squares: Tensor) -> Tensor:
        """Sum over the ranks, which hold different input features of each row."""
        return all_reduce(squares, self.mesh.group("etp"))
