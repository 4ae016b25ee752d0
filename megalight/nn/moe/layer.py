"""The mixture-of-experts layer, used in place of a feed-forward layer."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megalight.nn.context import LayerContext
from megalight.nn.linear import Linear
from megalight.nn.mlp import MLP
from megalight.nn.moe.beside import beside
from megalight.nn.moe.experts import Experts
from megalight.nn.moe.router import Router


class MoE(nn.Module):
    """Sends each token through some experts, and adds up their outputs, weighted by the router.

    Args:
        router: chooses the experts of each token.
        experts: the experts.
        shared: the shared expert, a network for all tokens, whose output is added.
        shared_gate: ``h -> 1``; the sigmoid of its output multiplies that of ``shared``.

    Attributes:
        shared_expert_overlap: compute ``shared`` on a CUDA stream of its own, while tokens travel to their experts.
    """

    def __init__(
        self, router: Router, experts: Experts, shared: MLP | None = None, shared_gate: Linear | None = None
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate
        self.shared_expert_overlap = False

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """``[T, h] -> [T, h]``."""
        routes = self.router(hidden, context)
        # Before the dispatch, in which the host may wait: the other stream must have its work by then.
        start = beside if self.shared_expert_overlap else partial
        shared = None if self.shared is None else start(self._for_all, hidden)
        dispatcher = self.experts.dispatcher
        copies, memo = dispatcher.dispatch(hidden, routes, len(self.experts), self.router.rows(hidden.shape[0]))
        out = dispatcher.combine(self.experts(copies), memo)
        # Read last: the wait for the shared expert comes after all that can run beside it.
        return out if shared is None else out + shared()

    def _for_all(self, hidden: Tensor) -> Tensor:
        assert self.shared is not None
        out: Tensor = self.shared(hidden)
        return out if self.shared_gate is None else out * self.shared_gate(hidden).sigmoid()
