"""The most likely next tokens of a teacher, as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TopTokens:
    """For each token, the ``K`` most likely next ones of a teacher, and one bucket for all others.

    Attributes:
        ids: ``[..., K]`` int32, different ones for each token.
        log_probs: ``[..., K]``: their log-probabilities.
        log_rest: ``[...]``: the logarithm of what all others have together; ``-inf`` if there are none.
    """

    ids: Tensor
    log_probs: Tensor
    log_rest: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> TopTokens:
        """Return the same after a change of every tensor."""
        return TopTokens(change(self.ids), change(self.log_probs), change(self.log_rest))

    @classmethod
    def stack(cls, rows: Sequence[TopTokens]) -> TopTokens:
        """Return those of several samples, along a new first dim."""
        return cls(*(torch.stack([getattr(row, name) for row in rows]) for name in ("ids", "log_probs", "log_rest")))
