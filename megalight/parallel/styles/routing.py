"""Routers, whose losses are means over all tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalight.nn.moe import Router
from megalight.parallel.expert.pool import MeshPool
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register


@register
@dataclass(frozen=True)
class Routing(Style):
    """A router (``nn.moe.Router``): every rank holds it whole, and routes its own tokens.

    Under sequence parallelism these are a share of the tokens, so gradients are summed over ``tp``.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the router, with a pool over all ranks that hold tokens of the micro-batch."""
        router: Router = self.expect(name, module, Router)
        splitter.keep(name, router, partial=splitter.shared.sequence_parallel)
        # The balancing loss is a product of two means over the micro-batch; means of shares
        # would give another product.
        router.pool = MeshPool(splitter.shared)
