"""Loads of the experts over the micro-batches of a step so far."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megalight.nn.context import LayerContext


class RunningLoads:
    """Sums of the counts of all micro-batches since the step began.

    Recompute asks for the sums again, in a later pass, and gets those of the first one.

    Attributes:
        sums: ``[S, E + 1]`` float64: choices of each expert, and tokens. None before the first micro-batch.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self._seen: WeakKeyDictionary[LayerContext, Tensor] = WeakKeyDictionary()

    def add(self, counts: Tensor, context: LayerContext) -> Tensor:
        """Add the counts of one micro-batch, unless it does not count, and return the sums."""
        if context not in self._seen:
            if self.sums is None or self.sums.device != counts.device:
                self.sums = torch.zeros_like(counts, dtype=torch.float64)
            # Times zero, and not left out: a recorded pass always runs the same ops.
            self.sums.add_(counts, alpha=1 if context.side_losses.counts else 0)
            # A copy of the sums as they are now. Later micro-batches go on adding to them.
            self._seen[context] = self.sums.to(counts.dtype, copy=True)
        return self._seen[context]

    def reset(self) -> None:
        """Begin a step."""
        if self.sums is not None:
            # In place, because a recorded pass adds to this address.
            self.sums.zero_()
