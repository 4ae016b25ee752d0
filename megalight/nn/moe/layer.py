"""The mixture-of-experts layer, in place of a feed-forward layer; a shared expert may run on a side stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from megalight.nn.context import LayerContext
from megalight.nn.linear import Linear
from megalight.nn.mlp import MLP
from megalight.nn.moe.experts import Experts
from megalight.nn.moe.router import Router
from megalight.ops.batch_invariant import MODE, rowwise
from megalight.ops.note import note_of, recipe_of


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def on_side_stream(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """Start ``function(x)`` on a stream of its own; the returned function lets the current stream wait for the result.

    Autograd runs the backward of each op on the stream of its forward, so the backward is beside the rest, too. On the
    CPU the work is done at once.
    """
    if not x.is_cuda:
        result = function(x)
        return lambda: result
    # Where x is a leaf (the input of a recomputed region), its gradient is summed on the stream of its first use, and
    # torch warns of gradients that come from another. The view's backward takes them over to the current stream.
    seen = x.view_as(x)
    if (note := note_of(x)) is not None:
        seen.megalight_note = note  # type: ignore[attr-defined]
    side = _stream(x.device)
    # The input is made on the current stream.
    side.wait_stream(torch.cuda.current_stream(x.device))
    # The backward reads these on the side stream, and may be the last to do so: their memory must not be reused before.
    recipe = recipe_of(x)
    for tensor in (x, *(recipe.ingredients if recipe is not None else ())):
        tensor.record_stream(side)
    with torch.cuda.stream(side):
        result = function(seen)

    def finish() -> Tensor:
        current = torch.cuda.current_stream(x.device)
        # The result is read on the current stream, and its memory belongs to the other one.
        current.wait_stream(side)
        result.record_stream(current)
        return result

    return finish


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
        start = on_side_stream if self.shared_expert_overlap else partial
        shared = None if self.shared is None else start(self._for_all, hidden)
        dispatcher = self.experts.dispatcher
        copies, memo = dispatcher.dispatch(hidden, routes, len(self.experts), self.router.rows(hidden.shape[0]))
        out = dispatcher.combine(self.experts(copies), memo)
        # Read last: the wait for the shared expert comes after all that can run beside it.
        return out if shared is None else out + shared()

    def _for_all(self, hidden: Tensor) -> Tensor:
        assert self.shared is not None
        out: Tensor = self.shared(hidden)
        if self.shared_gate is None:
            return out
        gate = self.shared_gate(hidden)
        factor: Tensor = rowwise(torch.sigmoid, gate) if MODE.on else gate.sigmoid()
        return out * factor
