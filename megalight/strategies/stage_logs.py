"""What ``forward_step`` and ``loss_step`` log on one part of a model is logged on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from megalight.errors import ConfigurationError
from megalight.parallel.mesh import ParallelMesh, shared_group
from megalight.parallel.step import StepDriver
from megalight.strategies.user_module import intercepted_log

REDUCTIONS = (torch.mean, torch.sum, torch.min, torch.max, sum, min, max)
"""Functions that Lightning takes as ``reduce_fx``."""


class LogCall(NamedTuple):
    """A call of ``log``, without its value, from a stage of the model."""

    stage: int
    name: str
    dtype: torch.dtype
    options: dict[str, Any]


class StageLogs:
    """Shares the values that pipeline stages log: loggers, and callbacks with monitors, run on other ranks, too.

    The first step of each kind tells whether its steps log anything. If they do, ranks then tell each other on the
    host what they logged, and one reduction brings the values.

    Args:
        pipelines: the ranks of each pipeline, in the order of its stages, as numbers within the group.
        own: index of the pipeline whose values this rank logs.
        group: returns the group of these ranks, and of those that run no stage; None: this rank is alone. Groups are
            asked for, and not kept, as they cannot be pickled.
        host: makes a group of the same ranks on the host.
        device: device of the values.
        step: knows the stage whose code runs.
    """

    def __init__(
        self,
        pipelines: Sequence[Sequence[int]],
        own: int,
        group: Callable[[], dist.ProcessGroup | None],
        host: Callable[[], dist.ProcessGroup | None],
        device: torch.device,
        step: StepDriver,
    ) -> None:
        self.pipelines = pipelines
        self.own = own
        self.group = group
        self.host = host
        self.device = device
        self.step = step
        self._logs: dict[str, bool] = {}

    @classmethod
    def of(cls, mesh: ParallelMesh, device: torch.device, step: StepDriver) -> StageLogs:
        """Share values along the pipeline of this rank."""
        return cls([range(mesh.pp)], 0, partial(mesh.group, "pp"), partial(_on_host, mesh), device, step)

    def forget(self) -> None:
        """Begin a run, whose first steps tell again whether they log."""
        self._logs.clear()

    @contextmanager
    def shared(self, module: pl.LightningModule, stage: str, later: bool = False) -> Iterator[None]:
        """Log what one stage logs inside on all stages, at the end. If several log a name, the last of them counts.

        Args:
            stage: the kind of step.
            later: log at the end, and not inside, also if this rank is alone.

        Raises:
            ConfigurationError: ranks cannot share what is logged, or a step logs although the first of its kind did
                not.
        """
        found: list[tuple[str, Any, dict[str, Any]]] = []
        if self.group() is None:
            with intercepted_log(module, lambda *call: found.append(call)) if later else nullcontext():
                yield
        else:
            calls: list[tuple[LogCall, Any]] = []
            with intercepted_log(module, lambda *call: calls.append((_call(self.step.running, *call), call[1]))):
                yield
            found = [(call.name, value, call.options) for call, value in self._joined(stage, calls)]
        for name, value, options in found:
            module.log(name, value, **options)

    def _joined(self, stage: str, own: list[tuple[LogCall, Any]]) -> list[tuple[LogCall, Tensor]]:
        calls, group = [call for call, _ in own], self.group()
        first = stage not in self._logs
        if not first and not self._logs[stage]:
            if calls:
                raise ConfigurationError(
                    f"the step logs {calls[0].name!r} by self.log, and the first step of this run logged nothing: "
                    "ranks with other parts of the model do not wait for it. Log it in the first step, too, or return "
                    "it as one of loss_step's metrics with a count of 0 where it is missing."
                )
            return []
        # Once by the group that is there. On the host later on, where no rank waits for the device.
        found: list[list[LogCall]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(found, calls, group=group if first else self.host())
        self._logs[stage] = any(found)
        here = dist.get_rank(group)
        places = [(index, *place) for index, ranks in enumerate(self.pipelines) for place in _that_count(ranks, found)]
        # Others have 0 in the place of a value: their sum is the value.
        row = torch.zeros(len(places), dtype=torch.float64, device=self.device)
        for entry, (_, rank, number) in zip(row, places, strict=True):
            if rank == here:
                entry.copy_(torch.as_tensor(own[number][1]).reshape(()), non_blocking=True)
        if places:
            dist.all_reduce(row, group=group)
        return [
            (call := found[rank][number], value.to(call.dtype))
            for value, (index, rank, number) in zip(row, places, strict=True)
            if index == self.own
        ]


def _on_host(mesh: ParallelMesh) -> dist.ProcessGroup:
    return shared_group(mesh.ranks("pp"), "decisions on the host", backend="gloo")


def _that_count(ranks: Sequence[int], found: Sequence[Sequence[LogCall]]) -> list[tuple[int, int]]:
    """Return rank and number of the calls of a pipeline that count: those from the last stage that logs a name."""
    every = [(rank, number, call) for rank in ranks for number, call in enumerate(found[rank])]
    # Of stages and not of ranks: a rank may have several, of which each logs.
    last: dict[str, int] = {}
    for _, _, call in every:
        last[call.name] = max(call.stage, last.get(call.name, 0))
    return [(rank, number) for rank, number, call in every if call.stage == last[call.name]]


def _call(stage: int, name: str, value: Any, options: dict[str, Any]) -> LogCall:
    reduction = options.get("reduce_fx", "mean")
    if not isinstance(reduction, str) and reduction not in REDUCTIONS:
        raise ConfigurationError(
            f"the step logs {name!r} by self.log with reduce_fx={getattr(reduction, '__name__', reduction)}, and "
            "Lightning reduces by 'mean', 'sum', 'min' or 'max' alone. Choose one of them."
        )
    if options.get("sync_dist_group") is not None:
        raise ConfigurationError(
            f"the step logs {name!r} by self.log with sync_dist_group, and ranks with other parts of the model, which "
            "log it too, are not in that group. Leave it out: sync_dist=True reduces over ranks with different data."
        )
    if isinstance(value, Metric):
        raise ConfigurationError(
            f"the step logs the metric {name!r}, a {type(value).__name__}, by self.log: only ranks with that part of "
            "the model update it. Return it as one of loss_step's metrics, a pair of sum and count."
        )
    if isinstance(value, Tensor) and value.numel() == 1:
        return LogCall(stage, name, value.dtype, options)
    if isinstance(value, Number):
        return LogCall(stage, name, torch.get_default_dtype(), options)
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ConfigurationError(
        f"the step logs {name!r} by self.log, and its value is {kind}. Log a number or a tensor of one element."
    )
