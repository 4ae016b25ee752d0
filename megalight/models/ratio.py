"""A metric that is a quotient of two sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from megalight.types import mean


class Ratio(Metric):
    """Sum of numerators over sum of denominators, in float64; 0 where nothing counted. NaN stays NaN.

    Unlike torchmetrics' ``MeanMetric`` it drops no NaN, so a diverged model does not look healthy, and reads nothing
    back from the device.
    """

    full_state_update = False
    higher_is_better = False
    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor) -> None:
        """Add one batch's sum and count, both 0-dim."""
        self.total += total
        self.count += count

    def compute(self) -> Tensor:
        """The quotient so far."""
        return mean(self.total, self.count)
