"""Sums over micro-batches, pipeline stages and ranks with different data: the same numbers on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.parallel.mesh import TOKEN_AXES, ParallelMesh
from megalight.types import Totals


class Names(NamedTuple):
    """Names of totals.

    Attributes:
        rows: names in the rows, which only the last pipeline stage has.
        side_losses: names of side losses of any stage.
    """

    rows: list[str]
    side_losses: list[str]


class GlobalTotals:
    """Reduces sums and counts of this rank's micro-batches to those of the whole batch."""

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device
        self._names: dict[str, Names] = {}

    @property
    def data_ranks(self) -> int:
        """Number of ranks with different data."""
        return self.mesh.size("dp") * self.mesh.size("cp")

    def sum(self, value: Tensor, *axes: str) -> Tensor:
        """Sum over mesh axes; by default over the ranks with different data."""
        return self._sum(value, axes or TOKEN_AXES)

    def of(
        self,
        stage: str,
        rows: Sequence[Totals],
        side_losses: Mapping[str, Tensor] = MappingProxyType({}),
        micro_batches: Tensor | None = None,
        counts: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return ``name -> (sum, count)`` over micro-batches and ranks, with one reduction.

        Args:
            stage: stage of Lightning's loops; names must be the same in all its steps.
            rows: one row per micro-batch on the last pipeline stage; elsewhere empty.
            side_losses: sums of the side losses of this stage; a side loss with the name of a metric is left out.
            micro_batches: the count of side losses, already over all ranks.
            counts: the counts of side losses that have their own, by name, already over all ranks.

        Raises:
            ConfigurationError: names are not the same.
        """
        names = self._names_of(stage, Names(list(rows[0]) if rows else [], list(side_losses)))
        # float64: sums over a global batch of millions of tokens, which float32 would round.
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        # The same zero for all missing values: it is only read.
        sums = [zero] * 2 * len(names.rows)
        if rows:
            columns = [[row[name][place].detach() for row in rows] for place in (0, 1) for name in names.rows]
            sums = [torch.stack(column).sum() for column in columns]
        sums += [side_losses.get(name, zero) for name in names.side_losses]
        # One tensor, one all-reduce, for all sums and counts of all stages. Stages without a value give 0.
        local = torch.stack([value.to(zero.device, torch.float64, non_blocking=True) for value in sums])
        # Over `pp` too, because only the last stage has the rows, and any stage may have side losses.
        reduced = self._sum(local, ("pp", *TOKEN_AXES))
        size = len(names.rows)
        totals = {name: (reduced[i], reduced[size + i]) for i, name in enumerate(names.rows)}
        for i, name in enumerate(names.side_losses):
            assert micro_batches is not None
            totals[name] = reduced[2 * size + i], counts.get(name, micro_batches)
        return totals

    def from_last_stage(self, values: list[Any]) -> list[Any]:
        """Broadcast the value of the last pipeline stage to all stages."""
        group = self.mesh.group("pp")
        if group is None:
            return values
        # Object collectives need a list of the same length on all ranks.
        shared = values or [None]
        dist.broadcast_object_list(shared, src=self.mesh.ranks("pp")[-1], group=group, device=self.device)
        return shared

    def _sum(self, value: Tensor, axes: Sequence[str]) -> Tensor:
        group = self.mesh.group(*axes)
        if group is not None:
            value = value.contiguous()
            dist.all_reduce(value, group=group)
        return value

    def _names_of(self, stage: str, here: Names) -> Names:
        """Return the names of all totals. Pipeline stages exchange theirs once."""
        group = self.mesh.group("pp")
        # Once per kind of step: an exchange of Python objects makes the host wait.
        if stage not in self._names or group is None:
            found: list[Any] = [here]
            if group is not None:
                found *= group.size()
                dist.all_gather_object(found, here, group=group)
            self._names[stage] = _joined(found)
        known = self._names[stage]
        if here.rows and set(here.rows) != set(known.rows):
            raise ConfigurationError(
                f"loss_step returned {sorted(here.rows)} and earlier {sorted(known.rows)}: every micro-batch must have "
                "the same metrics, since other pipeline stages wait for them. Return a count of 0 instead."
            )
        if not set(here.side_losses) <= {*known.rows, *known.side_losses}:
            raise ConfigurationError(
                f"layers attached the losses {sorted(here.side_losses)} and in the first step "
                f"{sorted(known.side_losses)}: other pipeline stages wait for the same ones. Attach 0 instead."
            )
        return known


def _joined(stages: Sequence[Names]) -> Names:
    """Join the names of all stages. If a metric and a side loss share a name, the metric is used."""
    rows = stages[-1].rows
    names = dict.fromkeys(name for stage in stages for name in stage.side_losses)
    return Names(rows, [name for name in names if name not in rows])
