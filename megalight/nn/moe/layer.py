"""The mixture-of-experts layer, used in place of a feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from megalight.nn.moe.experts import Experts


class MoE(nn.Module):
    """Sends each token through one expert.

    Args:
        router: ``[T, h] -> [T]``, the index of each token's expert.
        experts: the experts.
    """

    def __init__(self, router: nn.Module, experts: Experts) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, hidden: Tensor) -> Tensor:
        """``[T, h] -> [T, h]``."""
        out: Tensor = self.experts(hidden, self.router(hidden))
        return out
