"""Hidden states of a base, as they are stored for the training of its draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BaseStates:
    """What a draft reads of its base.

    Attributes:
        hidden: ``[..., h]``: the last hidden states, normed.
        auxiliary: ``[..., n h]``: those after some of the layers, side by side.
    """

    hidden: Tensor
    auxiliary: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> BaseStates:
        """Return the same after a change of every tensor."""
        return BaseStates(change(self.hidden), change(self.auxiliary))

    @classmethod
    def stack(cls, rows: Sequence[BaseStates]) -> BaseStates:
        """Return those of several samples, along a new first dim."""
        return cls(torch.stack([row.hidden for row in rows]), torch.stack([row.auxiliary for row in rows]))
