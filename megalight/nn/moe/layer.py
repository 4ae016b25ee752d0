"""The mixture-of-experts layer, used in place of a feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from megalight.nn.context import LayerContext
from megalight.nn.moe.experts import Experts
from megalight.nn.moe.router import Router


class MoE(nn.Module):
    """Sends each token through some experts, and adds up their outputs, weighted by the router."""

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """``[T, h] -> [T, h]``."""
        routes = self.router(hidden, context)
        dispatcher = self.experts.dispatcher
        copies, memo = dispatcher.dispatch(hidden, routes, len(self.experts), self.router.rows(len(hidden)))
        return dispatcher.combine(self.experts(copies), memo)
