"""Weight gradients that are computed later: backward passes hand on input gradients sooner.

Schedules that split a backward pass in two (https://arxiv.org/abs/2401.10241) need this: the previous pipeline stage
waits for the input gradient alone, and weight gradients fill what would be idle time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from megalight.ops.linear import wgrad
from megalight.ops.parameter import main_grad_of
from megalight.ops.quantize import Quantized

Begin: TypeAlias = Callable[[], Callable[[], Tensor | Quantized]]
"""Starts to bring an input here (a collective, say); what it returns waits for it."""


class WeightGradients:
    """Weight gradients still to be computed, in the order in which they came.

    Each holds the gradient of a linear layer's output and its input, or this rank's share of it. The rest of the graph
    is free. Everything happens on the stream that is current: run them on the one of the backward pass.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, Tensor, Begin]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, weight: Tensor, grad_y: Tensor, begin: Begin) -> None:
        """Add ``grad_y^T x`` to the weight's main gradient later, with the ``x [..., in]`` that ``begin()()`` gives.

        ``begin`` should hold detached tensors: others keep the graph alive.
        """
        self._waiting.append((weight, grad_y, begin))

    @torch.no_grad()
    def run(self) -> None:
        """Compute all, calling ``mark_grad_ready()`` for each. The next input is under way during each product.

        Ranks that share layers must run the same ones in the same order: inputs may take collectives.
        """
        finish = self._waiting[0][2]() if self._waiting else None
        while finish is not None:
            x = finish()
            weight, grad_y, _ = self._waiting.popleft()
            finish = self._waiting[0][2]() if self._waiting else None
            wgrad.add(weight, grad_y, x)
            del x, grad_y  # before the next input arrives


_current: list[WeightGradients] = []
"""The innermost queue, if any. Not thread-local: on CUDA, backward functions run in a thread of autograd's own."""


@contextmanager
def deferring(queue: WeightGradients) -> Iterator[None]:
    """Around a backward pass: weight gradients of linear layers go to ``queue``, where they can.

    Those of weights without a main gradient go to autograd at once. Gradients of biases, norms and embeddings are
    cheap and computed at once too. So is the output layer's where it is fused with the loss: its logits would have to
    be kept.
    """
    _current.append(queue)
    try:
        yield
    finally:
        _current.pop()


def queue_for(weight: Tensor) -> WeightGradients | None:
    """Where the gradient of ``weight`` waits, or None: compute it now."""
    return _current[-1] if _current and main_grad_of(weight) is not None else None
