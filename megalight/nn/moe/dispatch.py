"""How tokens get to their experts and back: the seam that other dispatchers replace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

Compute: TypeAlias = Callable[[Tensor, Sequence[int]], Tensor]
"""``[N, h]`` tokens grouped by expert, and how many each expert has -> ``[N, h]``."""


class Dispatcher(nn.Module, ABC):
    """Brings tokens to their experts, and what these make of them back."""

    @abstractmethod
    def forward(self, hidden: Tensor, chosen: Tensor, num_experts: int, compute: Compute) -> Tensor:
        """``[T, h] -> [T, h]``.

        Args:
            hidden: ``[T, h]`` tokens.
            chosen: ``[T]`` number of each token's expert.
            num_experts: experts that ``compute`` serves.
            compute: the experts.
        """


class LocalDispatcher(Dispatcher):
    """All experts are here: tokens are grouped by expert, in their own order within each."""

    def forward(self, hidden: Tensor, chosen: Tensor, num_experts: int, compute: Compute) -> Tensor:
        """``[T, h] -> [T, h]``. The host waits for the counts."""
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=num_experts).tolist()
        return compute(hidden[order], counts)[order.argsort()]
