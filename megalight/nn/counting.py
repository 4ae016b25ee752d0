"""Layers that count something over a training step, and act on the totals when it ends: the loads of experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Counting(nn.Module, ABC):
    """A module with counts.

    Attributes:
        counts: ``[n]`` float64, what this device has counted in the step so far. None: nothing is counted.
    """

    counts: Tensor | None = None

    @abstractmethod
    def end_step(self, totals: Tensor | None) -> None:
        """End a step. ``totals [n]``: the counts of the whole step, from all devices; None: nothing was counted."""

    def count(self, values: Tensor) -> None:
        """Add ``values [n]`` to the counts."""
        if self.counts is None or self.counts.device != values.device:
            self.counts = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
        # In place, and in float64: counts of a long step stay exact.
        self.counts.add_(values)


@torch.no_grad()
def end_step(model: nn.Module, total: Callable[[Tensor], Tensor]) -> None:
    """End a training step: give each module the totals of its counts, and start counting from 0.

    Args:
        model: its modules with counts, in order, are the same on every device.
        total: sums counts over all devices.
    """
    modules = [module for module in model.modules() if isinstance(module, Counting)]
    counts = [module.counts for module in modules if module.counts is not None]
    # One collective for all layers together.
    totals = iter(torch.split(total(torch.cat(counts)), [len(own) for own in counts]) if counts else ())
    for module in modules:
        module.end_step(None if module.counts is None else next(totals))
    # In place, because a recorded pass adds to this address.
    for own in counts:
        own.zero_()
