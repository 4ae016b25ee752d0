"""Means over features that several ranks hold together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megalight.parallel.collectives import all_reduce, copy
from megalight.parallel.tensor.shared import Shared


@dataclass(frozen=True)
class GroupMean:
    """The mean of the values of neighboring ``tp`` ranks, whose parts of a group of features are of one size.

    Several ranks may hold the same part, if all parts have equally many holders.

    Attributes:
        shared: the state that all tensor-parallel layers share.
        ranks: number of ranks that hold a group.
    """

    shared: Shared
    ranks: int

    def __call__(self, part: Tensor) -> Tensor:
        """Return the mean, in the shape of ``part``. The backward sums gradients over the ranks, too."""
        mesh = self.shared.mesh
        group = self.shared.group if self.ranks == mesh.tp else mesh.group(f"tp%{self.ranks}")
        # The sum enters the features of every rank, so each has one term of its gradient.
        return copy(all_reduce(part, group), group) / self.ranks
