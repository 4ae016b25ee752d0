"""Routers choose the expert of each token."""

from __future__ import annotations

from torch import Tensor, nn


class FixedRouter(nn.Module):
    """A fixed rule without parameters: the argmax of a token's first ``num_experts`` features is its expert.

    It learns nothing and balances nothing. Fixed routing is the baseline for learned routers (hash layers,
    https://arxiv.org/abs/2106.04426).
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, hidden: Tensor) -> Tensor:
        """``[T, h] -> [T]``: the index of each token's expert."""
        return hidden[:, : self.num_experts].argmax(-1)

    def extra_repr(self) -> str:
        """Return the number of experts, for printing."""
        return f"{self.num_experts} experts"
