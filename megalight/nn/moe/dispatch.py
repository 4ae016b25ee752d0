"""Dispatchers bring tokens to their experts and back. The local one can be replaced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

Compute: TypeAlias = Callable[[Tensor, Sequence[int]], Tensor]
"""Tokens ``[N, h]`` grouped by expert, and the number of tokens of each expert -> ``[N, h]``."""


class Dispatcher(nn.Module, ABC):
    """Sends tokens to their experts, and returns the outputs in the order of the tokens."""

    @abstractmethod
    def forward(self, hidden: Tensor, chosen: Tensor, num_experts: int, compute: Compute) -> Tensor:
        """``[T, h] -> [T, h]``.

        Args:
            hidden: ``[T, h]``, the tokens.
            chosen: ``[T]``, the index of each token's expert.
            num_experts: number of experts of ``compute``.
            compute: applies the experts to grouped tokens.
        """


class LocalDispatcher(Dispatcher):
    """All experts are on this device. Tokens are sorted by expert, and tokens of one expert keep their order."""

    def forward(self, hidden: Tensor, chosen: Tensor, num_experts: int, compute: Compute) -> Tensor:
        """``[T, h] -> [T, h]``. It synchronises: the host needs the counts of tokens."""
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=num_experts).tolist()
        # the argsort of a permutation is its inverse
        return compute(hidden[order], counts)[order.argsort()]
