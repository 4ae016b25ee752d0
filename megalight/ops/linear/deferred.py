"""Delayed weight gradients, so that backward passes return input gradients sooner.

Schedules that split a backward pass in two (https://arxiv.org/abs/2401.10241) need this. The previous pipeline stage
waits only for the input gradient, and weight gradients fill time that would be idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megalight.ops.linear import wgrad
from megalight.ops.parameter import main_grad_of, state_of

Begin: TypeAlias = Callable[[], Callable[[], Any]]
"""Starts to get an input (by a collective, for example); the returned function waits for it. The input is a tensor, or
cast."""

Add: TypeAlias = Callable[[Tensor, Tensor, Any], None]
"""Adds the gradient of ``(weight, grad_y, x)`` to the weight's main gradient, and reports it."""


class WeightGradients:
    """A queue of weight gradients that are still to be computed, first in, first out.

    Each entry holds the output gradient of a linear layer and its input, or this rank's share of it. The rest of the
    graph is freed. All work runs on the current stream, so call :meth:`run` on the stream of the backward pass.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, Tensor, Begin, Add]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, weight: Tensor, grad_y: Tensor, begin: Begin, add: Add | None = None) -> None:
        """Queue ``grad_y^T x`` for the weight's main gradient; ``begin()()`` will return ``x [..., in]``.

        ``begin`` should hold detached tensors, because others keep the graph alive. ``add`` computes the product;
        None: that of a dense layer.
        """
        state_of(weight).expect_late()
        self._waiting.append((weight, grad_y, begin, add or wgrad.add))

    @torch.no_grad()
    def run(self) -> None:
        """Compute all, and call ``mark_grad_ready()`` for each. The next input is fetched during each product.

        Ranks that share layers must run the same ones in the same order, because getting inputs may need collectives.
        """
        finish = self._waiting[0][2]() if self._waiting else None
        while finish is not None:
            x = finish()
            weight, grad_y, _, add = self._waiting.popleft()
            # Begin to fetch the next input before this product is queued, so that communication and product overlap.
            finish = self._waiting[0][2]() if self._waiting else None
            state_of(weight).begin_late()
            add(weight, grad_y, x)
            del x, grad_y  # free the memory before the next input arrives


_current: list[WeightGradients] = []
"""The active queues; the last one is used. Not thread-local, as autograd on CUDA runs backwards in its own thread."""


@contextmanager
def deferring(queue: WeightGradients) -> Iterator[None]:
    """During a backward pass, put weight gradients of linear layers into ``queue`` if possible.

    Weights without a main gradient get theirs at once. Gradients of biases, norms and embeddings are cheap, and are
    computed at once too. So is that of an output layer fused with the loss, because its logits would have to be kept.
    """
    _current.append(queue)
    try:
        yield
    finally:
        _current.pop()


def queue_for(weight: Tensor) -> WeightGradients | None:
    """Return the queue for the gradient of ``weight``; None: compute it now."""
    return _current[-1] if _current and main_grad_of(weight) is not None else None
