"""What ``forward_step`` and ``loss_step`` log on one pipeline stage is logged on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from megalight.errors import ConfigurationError
from megalight.parallel.groups import shared_group
from megalight.parallel.mesh import ParallelMesh
from megalight.strategies.own_step import logs_of


class Call(NamedTuple):
    """A call of ``log``, without its value."""

    name: str
    dtype: torch.dtype
    options: dict[str, Any]


class StageLogs:
    """Shares the values that pipeline stages log: loggers, and callbacks with monitors, run on other ranks, too.

    The first step of each kind tells whether its steps log anything. If they do, stages then tell each other on the
    host what they logged, and one reduction brings the values.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device
        self._logs: dict[str, bool] = {}

    def forget(self) -> None:
        """Begin a run, whose first steps tell again whether they log."""
        self._logs.clear()

    @contextmanager
    def shared(self, module: pl.LightningModule, stage: str) -> Iterator[None]:
        """Log what one stage logs inside on all stages, at the end. If several log a name, the last of them counts.

        Args:
            stage: the kind of step.

        Raises:
            ConfigurationError: a metric object is logged, or a step logs although the first of its kind did not.
        """
        if self.mesh.pp == 1:
            yield
            return
        with logs_of(module, collect=True) as found:
            yield
        calls = [_call(name, value, options) for name, value, options in found]
        for (name, _, options), value in self._joined(stage, calls, [value for _, value, _ in found]):
            module.log(name, value, **options)

    def _joined(self, stage: str, calls: list[Call], values: Sequence[Any]) -> list[tuple[Call, Tensor]]:
        first = stage not in self._logs
        if not first and not self._logs[stage]:
            if calls:
                raise ConfigurationError(
                    f"the step logs {calls[0].name!r} by self.log, and the first step of this run logged nothing: the "
                    "other pipeline stages do not wait for it. Log it in the first step, too, or return it as one of "
                    "loss_step's metrics with a count of 0 where it is missing."
                )
            return []
        # Once by the group that is there. On the host later on, where no rank waits for the device.
        group = self.mesh.group("pp") if first else self._host_group()
        found: list[list[Call]] = [[] for _ in range(self.mesh.pp)]
        dist.all_gather_object(found, calls, group=group)
        self._logs[stage] = any(found)
        last = {call.name: place for place, stage_calls in enumerate(found) for call in stage_calls}
        here = self.mesh.rank("pp")
        named = [(place, call) for place, given in enumerate(found) for call in given if last[call.name] == place]
        own = iter([value for call, value in zip(calls, values, strict=True) if last[call.name] == here])
        # Others have 0 in the place of a value: their sum is the value.
        row = torch.zeros(len(named), dtype=torch.float64, device=self.device)
        for number, (place, _) in enumerate(named):
            if place == here:
                row[number].copy_(torch.as_tensor(next(own)).reshape(()), non_blocking=True)
        if named:
            dist.all_reduce(row, group=self.mesh.group("pp"))
        return [(call, value.to(call.dtype)) for (_, call), value in zip(named, row, strict=True)]

    def _host_group(self) -> dist.ProcessGroup:
        return shared_group(self.mesh.ranks("pp"), "decisions on the host", backend="gloo")


def _call(name: str, value: Any, options: dict[str, Any]) -> Call:
    if isinstance(value, Metric):
        raise ConfigurationError(
            f"the step logs the metric {name!r}, a {type(value).__name__}, by self.log: only one stage of the pipeline "
            "updates it. Return it as one of loss_step's metrics, a pair of sum and count."
        )
    if isinstance(value, Tensor) and value.numel() == 1:
        return Call(name, value.dtype, options)
    if isinstance(value, Number):
        return Call(name, torch.get_default_dtype(), options)
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ConfigurationError(
        f"the step logs {name!r} by self.log, and its value is {kind}. Log a number or a tensor of one element."
    )
