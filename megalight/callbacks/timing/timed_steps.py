"""A base class for callbacks that report times: windows of timed steps, gathered from all ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch.distributed as dist

from megalight.callbacks.timing.spans import StepSpans
from megalight.callbacks.timing.timer import LEVELS, TimerTable, Times
from megalight.errors import ConfigurationError
from megalight.strategies.collectives import Collectives

# Gathering Python values from all ranks through host memory, while the device goes on working.


T = TypeVar("T")


class HostGather:
    """Gathers plain Python values from every rank to every rank. All ranks must create and call it together."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.world_size = trainer.world_size
        self.group: dist.ProcessGroup | None = None
        if self.world_size == 1:
            return
        # Our strategies have such a group already, and share it.
        if isinstance(trainer.strategy, Collectives):
            self.group = trainer.strategy.host_group()
        elif dist.get_backend() != "gloo":
            self.group = dist.new_group(backend="gloo")

    def __call__(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]


class TimedSteps(StepSpans):
    """Times windows of a few optimizer steps. A window is reported when the next one closes.

    By then the device has finished it, unless the host is more than a whole window ahead. The first step of training
    (allocations, compilation, the first collectives) is a window of its own. Validation is not timed.

    Args:
        level: the finest level of spans that is timed.
        every_n_steps: optimizer steps in a window. None: the trainer's ``log_every_n_steps``.

    Raises:
        ConfigurationError: the level does not exist, or ``every_n_steps`` is below 1.
    """

    during_validation = False
    levels: Mapping[str, int] = LEVELS

    def __init__(self, level: int, every_n_steps: int | None) -> None:
        super().__init__()
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(
                f"every_n_steps is {every_n_steps}; it must be at least 1, or null for log_every_n_steps."
            )
        self.level = level
        self.every_n_steps = every_n_steps
        self._gather: HostGather | None = None
        self._table: TimerTable | None = None
        self._pending: Times | None = None
        self._closed = 0
        self._first = True

    @abstractmethod
    def report(self, trainer: pl.Trainer, times: Times, rows: list[Any]) -> None:
        """Report a window on rank 0. ``rows`` holds the result of :meth:`row` from each rank."""

    def row(self, trainer: pl.Trainer, seconds: dict[str, float]) -> Any:
        """Return this rank's values of a window. ``seconds`` holds seconds per step, by name."""
        return seconds

    def listener(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> TimerTable:
        """Create new timers."""
        self._gather = HostGather(trainer)
        self._pending, self._closed, self._first = None, trainer.global_step, True
        self._table = TimerTable(trainer.strategy.root_device, self.level, self.levels)
        return self._table

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the window if it has enough steps."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._table is not None:
            # Old events are read as they pass. A long window would hold thousands otherwise.
            self._table.settle()
        steps = trainer.global_step - self._closed
        every = self.every_n_steps or max(int(trainer.log_every_n_steps), 1)  # type: ignore[attr-defined]
        if self._table is not None and steps and (self._first or steps >= every):
            # The window before this one: the device has finished it by now, so nothing waits.
            self._report(trainer)
            self._end_all()
            self._pending = self._table.close(trainer.global_step, steps, self._first)
            self._begin("data")
            self._closed, self._first = trainer.global_step, False

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the last full window."""
        self._report(trainer)
        super().on_train_end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Report nothing: other ranks and the device may have failed."""
        self._open.clear()
        super().on_exception(trainer, pl_module, exception)

    def _report(self, trainer: pl.Trainer) -> None:
        times, self._pending = self._pending, None
        if times is None:
            return
        assert self._gather is not None
        # A collective on the host, in the same step on all ranks.
        rows = self._gather(self.row(trainer, times.seconds()))
        if trainer.is_global_zero:
            self.report(trainer, times, rows)


def log_row(trainer: pl.Trainer, row: dict[str, float], step: int) -> None:
    """Write metrics to every logger, under the step that they belong to."""
    for logger in trainer.loggers:
        logger.log_metrics(row, step=step)
