"""Rows of a fixed number for each pair of a sending rank and an expert, whatever the routes are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Padded:
    """Received rows, ``[ranks, experts, capacity]``, and rows of experts, ``[experts, rows]``.

    Attributes:
        ranks: number of ranks that send.
        experts: number of experts that are here.
        capacity: number of rows from each rank for each expert.
        rows: number of rows of each expert, at least ``ranks * capacity``; the rest are zeros.
    """

    ranks: int
    experts: int
    capacity: int
    rows: int

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each expert."""
        return [self.rows] * self.experts

    def offsets(self, device: torch.device) -> Tensor:
        """``[experts]`` int32: the end of each expert's rows. It is made on the device, which a graph can record."""
        return torch.arange(1, self.experts + 1, dtype=torch.int32, device=device) * self.rows

    def by_expert(self, received: Tensor) -> Tensor:
        """``[ranks * experts * capacity, ...] -> [experts * rows, ...]``."""
        rows = received.reshape(self.ranks, self.experts, self.capacity, *received.shape[1:])
        rows = rows.transpose(0, 1).flatten(1, 2)
        missing = self.rows - rows.shape[1]
        if missing:
            rows = F.pad(rows, (0, 0) * (rows.dim() - 2) + (0, missing))
        return rows.flatten(0, 1)

    def by_rank(self, outputs: Tensor) -> Tensor:
        """``[experts * rows, h] -> [ranks * experts * capacity, h]``: undo :meth:`by_expert`."""
        rows = outputs.reshape(self.experts, self.rows, *outputs.shape[1:])[:, : self.ranks * self.capacity]
        rows = rows.reshape(self.experts, self.ranks, self.capacity, *outputs.shape[1:])
        return rows.transpose(0, 1).flatten(0, 2)
