"""Sums over micro-batches, pipeline stages and the ranks that see different data: the same numbers on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.parallel.mesh import TOKEN_AXES, ParallelMesh
from megalight.types import Totals


class GlobalTotals:
    """Sums and counts of this rank's micro-batches, made those of the whole batch."""

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device
        self._names: dict[str, list[str]] = {}

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data."""
        return self.mesh.size("dp") * self.mesh.size("cp")

    def sum(self, value: Tensor) -> Tensor:
        """Over the ranks that see different data."""
        return self._sum(value, TOKEN_AXES)

    def of(self, stage: str, rows: Sequence[Totals]) -> dict[str, tuple[Tensor, Tensor]]:
        """``name -> (sum, count)`` over micro-batches (the rows) and ranks, in one reduction.

        Pipeline stages other than the last have no rows.

        Args:
            stage: of Lightning's loops; names must be the same in all its steps.

        Raises:
            ConfigurationError: they are not.
        """
        names = self._names_of(stage, list(rows[0]) if rows else [])
        local = torch.zeros(2 * len(names), dtype=torch.float64, device=self.device)
        if rows:
            columns = [[row[name][place].detach() for row in rows] for place in (0, 1) for name in names]
            sums = [torch.stack(column).sum() for column in columns]
            local = torch.stack([value.to(local.device, torch.float64, non_blocking=True) for value in sums])
        reduced = self._sum(local, ("pp", *TOKEN_AXES))
        return {name: (reduced[i], reduced[len(names) + i]) for i, name in enumerate(names)}

    def from_last_stage(self, values: list[Any]) -> list[Any]:
        """The value that the last pipeline stage has, on all of them."""
        group = self.mesh.group("pp")
        if group is None:
            return values
        shared = values or [None]
        dist.broadcast_object_list(shared, src=self.mesh.ranks("pp")[-1], group=group, device=self.device)
        return shared

    def _sum(self, value: Tensor, axes: Sequence[str]) -> Tensor:
        group = self.mesh.group(*axes)
        if group is not None:
            value = value.contiguous()
            dist.all_reduce(value, group=group)
        return value

    def _names_of(self, stage: str, names: list[str]) -> list[str]:
        """The names of all totals. Other stages learn them from the last one, once."""
        if self.mesh.pp == 1:
            return names
        if stage not in self._names:
            self._names[stage] = self.from_last_stage([names] if names else [])[0]
        known = self._names[stage]
        if names and set(names) != set(known):
            raise ConfigurationError(
                f"loss_step returned {sorted(names)} and earlier {sorted(known)}: every micro-batch must bring the "
                "same metrics and auxiliary losses: other pipeline stages wait for them. Return a count of 0 instead."
            )
        return known
