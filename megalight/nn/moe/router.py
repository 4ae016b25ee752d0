"""Which expert a token goes to."""

from __future__ import annotations

from torch import Tensor, nn


class FixedRouter(nn.Module):
    """A fixed rule, without parameters: of a token's first ``num_experts`` features the largest is its expert's number.

    It learns nothing and balances nothing. Fixed routing is the baseline that learned routers are compared with (hash
    layers, https://arxiv.org/abs/2106.04426).
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, hidden: Tensor) -> Tensor:
        """``[T, h] -> [T]``: the number of each token's expert."""
        return hidden[:, : self.num_experts].argmax(-1)

    def extra_repr(self) -> str:
        """The number of experts, for printing."""
        return f"{self.num_experts} experts"
