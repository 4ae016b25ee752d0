"""A window of steps for torch's profiler."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from megalight.callbacks.timing.step_timing import StepSpans, label
from megalight.errors import ConfigurationError

# Windows of steps on some ranks, for tools that are too expensive to run all the time.


@dataclass(frozen=True)
class StepWindow:
    """A window of the optimizer steps ``start`` to ``stop - 1``, which may repeat every few steps.

    Args:
        start: the first step of the window. Training begins with step 0.
        stop: the first step after the window.
        every: steps from the start of one window to the next. None: there is one window.

    Raises:
        ConfigurationError: the window is empty, or windows overlap.
    """

    start: int
    stop: int
    every: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ConfigurationError(
                f"start_step is {self.start} and stop_step is {self.stop}; start_step must be at least 0 and below "
                "stop_step."
            )
        if self.every is not None and self.every < self.steps:
            raise ConfigurationError(
                f"every_n_steps is {self.every}, but a window has {self.steps} steps; windows must not overlap. Use "
                f"every_n_steps of at least {self.steps}, or null for one window."
            )

    @property
    def steps(self) -> int:
        """Number of steps in one window."""
        return self.stop - self.start

    def begins(self, step: int, ahead: int = 0) -> bool:
        """Return whether a window begins ``ahead`` steps after ``step``.

        If the first window begins at a step below ``ahead``, step 0 counts.
        """
        if self.every is None or step + ahead < self.start + self.every:
            # The first window may begin before so many steps were done.
            return step == max(self.start - ahead, 0)
        return (step + ahead - self.start) % self.every == 0


def check_ranks(ranks: Sequence[int]) -> frozenset[int]:
    """Return the ranks as a set.

    Raises:
        ConfigurationError: there is no rank, or a negative one.
    """
    if not ranks or min(ranks) < 0:
        raise ConfigurationError(f"ranks is {list(ranks)}; give at least one rank, counted from 0.")
    return frozenset(ranks)


log = logging.getLogger(__name__)


class Annotations:
    """A listener that turns spans into ranges of torch's profiler."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def begin(self, name: str, where: dict[str, int]) -> None:
        """Begin the range of a span."""
        # `record_function` is a context manager, and spans tell of both ends in separate calls.
        entered = record_function(label(name, where))
        entered.__enter__()  # type: ignore[no-untyped-call]
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        self._threads.stack.append(entered)

    def end(self, name: str) -> None:
        """End the range of a span."""
        self._threads.stack.pop().__exit__(None, None, None)


class ProfilerWindow(StepSpans):
    """Profiles a few steps with ``torch.profiler``. Parts of a step have the names in :mod:`megalight.parallel.trace`.

    For each window and rank it writes the trace ``steps=A-B-rank=R.json.gz`` (for Perfetto or ``chrome://tracing``) and
    a table of the most expensive operators, ``steps=A-B-rank=R.txt``.

    Args:
        start_step: the first optimizer step of the window. Training begins with step 0.
        stop_step: the first optimizer step after the window.
        every_n_steps: steps from the start of one window to the next. null: one window only.
        warmup: steps before the window in which the profiler runs without recording, because its start is slow.
        ranks: the ranks that profile.
        rows: rows of the table.
        shapes: whether to record the input shapes of operators.
        stacks: whether to record the Python stack of every operator (slow).
        memory: whether to record allocations.
        dirpath: folder to write to. null: ``profile`` in the trainer's ``default_root_dir``.

    Attributes:
        traces: paths of the traces that this rank has written.

    Raises:
        ConfigurationError: an argument is out of range, or windows are empty or overlap.
    """

    def __init__(
        self,
        start_step: int,
        stop_step: int,
        every_n_steps: int | None = None,
        warmup: int = 1,
        ranks: Sequence[int] = (0,),
        rows: int = 20,
        shapes: bool = False,
        stacks: bool = False,
        memory: bool = False,
        dirpath: str | None = None,
    ) -> None:
        super().__init__()
        if warmup < 0 or rows < 1:
            raise ConfigurationError(
                f"warmup is {warmup} and rows is {rows}; warmup must be at least 0, rows at least 1."
            )
        self.window = StepWindow(start_step, stop_step, every_n_steps)
        if every_n_steps is not None and every_n_steps < self.window.steps + warmup:
            raise ConfigurationError(
                f"every_n_steps is {every_n_steps}; it must be at least {self.window.steps + warmup} for a window of "
                f"{self.window.steps} steps with {warmup} steps of warm-up."
            )
        self.warmup = warmup
        self.ranks = check_ranks(ranks)
        self.rows = rows
        self.shapes = shapes
        self.stacks = stacks
        self.memory = memory
        self.dirpath = dirpath
        self.traces: list[Path] = []
        self._profiler: profile | None = None
        self._first = 0
        self._step = 0
        self._seen = 0

    def listener(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Annotations | None:
        """Return the listener, on the ranks that profile."""
        return Annotations() if trainer.global_rank in self.ranks else None

    def _listen(self, trainer: pl.Trainer) -> None:
        """Listen only inside a window."""
        # Outside of a window nothing listens, so that spans cost nothing there.
        if self._profiler is not None:
            super()._listen(trainer)

    def _begin(self, name: str) -> None:
        if self._profiler is not None:
            super()._begin(name)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the profiler before the first step of the warm-up."""
        step = trainer.global_step
        if self._listener is not None and self._profiler is None and self.window.begins(step, self.warmup):
            # A window at the very start has less warm-up than was asked for.
            warmup = self.window.start - step if step <= self.window.start else self.warmup
            self._first, self._step = step + warmup, step
            self._profiler = self._start(trainer, warmup)
            self._listen(trainer)
        # Steps that the trace holds are those that were begun.
        self._seen = step
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the profiler after the last step of the window."""
        # First: `step()` of the profiler must not fall inside a range of ours.
        self._end_all()
        if self._profiler is None:
            return
        # With gradient accumulation, several batches make one step.
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            if self._step == self._first + self.window.steps:
                self._write(trainer)
                return
            # The profiler counts optimizer steps, and its schedule tells which of them it records.
            self._profiler.step()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write an unfinished window."""
        self._end_all()
        self._write(trainer)
        super().on_train_end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write an unfinished window: it may show the cause of the error."""
        self._end_all()
        self._write(trainer)
        super().on_exception(trainer, pl_module, exception)

    def _start(self, trainer: pl.Trainer, warmup: int) -> profile:
        activities = [ProfilerActivity.CPU]
        if trainer.strategy.root_device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities,
            # Once: the next window gets a profiler of its own.
            schedule=schedule(wait=0, warmup=warmup, active=self.window.steps, repeat=1),
            record_shapes=self.shapes,
            with_stack=self.stacks,
            profile_memory=self.memory,
        )
        profiler.start()
        return profiler

    def _write(self, trainer: pl.Trainer) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._stop()
        # After our ranges have ended: an open one would be missing in the trace.
        profiler.stop()
        # A trace without a recorded step is an empty file, which would be taken for a result.
        if self._seen < self._first:
            log.warning("training ended in the profiler's warm-up, before step %d: no trace written.", self._first)
            return
        folder = Path(self.dirpath or Path(trainer.default_root_dir) / "profile")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"steps={self._first}-{self._seen}-rank={trainer.global_rank}.json.gz"
        profiler.export_chrome_trace(str(path))
        device = "device" if trainer.strategy.root_device.type == "cuda" else "cpu"
        table = profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=self.rows)
        path.with_name(path.name.replace(".json.gz", ".txt")).write_text(table, encoding="utf-8")
        self.traces.append(path)
        log.info("profile of steps %d to %d: %s", self._first, self._seen, path)


# A window of steps for Nsight Systems.


class NsysWindow(pl.Callback):
    """Makes Nsight Systems record only a few steps: ``nsys profile --capture-range=cudaProfilerApi ...``.

    The host waits for the device at both ends of the window, so that it holds whole steps.

    Args:
        start_step: the first recorded optimizer step. Training begins with step 0.
        stop_step: the first optimizer step after the window.
        ranks: the ranks that record.

    Raises:
        ConfigurationError: the window is empty, or one of ``ranks`` is not on CUDA (in ``fit``).
    """

    def __init__(self, start_step: int, stop_step: int, ranks: Sequence[int] = (0,)) -> None:
        self.window = StepWindow(start_step, stop_step)
        self.ranks = check_ranks(ranks)
        self._recording = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that this rank is on CUDA."""
        if trainer.global_rank in self.ranks and trainer.strategy.root_device.type != "cuda":
            raise ConfigurationError(
                f"NsysWindow needs a CUDA device, but rank {trainer.global_rank} runs on "
                f"{trainer.strategy.root_device.type}; use megalight.callbacks.ProfilerWindow instead."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start recording before the first step of the window."""
        if not self._recording and trainer.global_rank in self.ranks and self.window.begins(trainer.global_step):
            # The device first finishes what was queued before the window.
            torch.cuda.synchronize()
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            self._recording = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop recording after the last step of the window."""
        if trainer.global_step >= self.window.stop:
            self._stop()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop recording."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop recording without waiting for the device, which may have failed."""
        self._stop(wait=False)

    def _stop(self, wait: bool = True) -> None:
        if self._recording:
            self._recording = False
            # After a failure of the device, waiting would hang or raise again.
            if wait:
                torch.cuda.synchronize()
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
