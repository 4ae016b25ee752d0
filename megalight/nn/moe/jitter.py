"""Noise on the input of a router."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Jitter(nn.Module):
    """In training, multiplies its input by random numbers from ``1 - p`` to ``1 + p``."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with noise, in its own dtype."""
        if not self.training or not self.p:
            return x
        return x * torch.empty_like(x).uniform_(1 - self.p, 1 + self.p)

    def extra_repr(self) -> str:
        """Return the range, for printing."""
        return f"p={self.p}"
