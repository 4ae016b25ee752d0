"""A metric: the quotient of two sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from megalight.types import mean


class Ratio(Metric):
    """Sum of numerators divided by sum of denominators, in float64. It is 0 if the denominators are 0; NaN stays NaN.

    Unlike torchmetrics' ``MeanMetric`` it does not drop NaN, which would hide that a model diverged, and it does not
    copy values to the host.
    """

    full_state_update = False
    higher_is_better = False
    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # float64: over a whole validation set, float32 would no longer count single tokens.
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor) -> None:
        """Add the sum and the count of one batch, both 0-dim."""
        self.total += total
        self.count += count

    def compute(self) -> Tensor:
        """Return the quotient so far."""
        return mean(self.total, self.count)
