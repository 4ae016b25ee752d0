"""A head that all heads read, where these are divided over ``tp``."""

from __future__ import annotations

from torch import Tensor, nn

from megalight.parallel.collectives import all_gather, copy
from megalight.parallel.tensor.shared import Shared


class ForAllHeads(nn.Module):
    """Brings a head to the ranks whose heads read it. Its gradient is the sum over their heads.

    Args:
        shared: the state that all tensor-parallel layers share.
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """``[T/tp, D] -> [T, D]`` under sequence parallelism, else ``[T, D] -> [T, D]``."""
        shared = self.shared
        # each rank's heads see all tokens, so a sum over ranks is missing in both cases
        if shared.sequence_parallel:
            return all_gather(x, shared.group, shared.sequence_dim)
        return copy(x, shared.group)
