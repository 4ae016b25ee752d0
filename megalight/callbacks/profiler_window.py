"""A window of steps for torch's profiler: traces by rank, and a small table."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from megalight.callbacks.spans import StepSpans, label
from megalight.callbacks.windows import StepWindow, check_ranks
from megalight.errors import ConfigurationError

log = logging.getLogger(__name__)


class Annotations:
    """Spans as ranges of torch's profiler."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def begin(self, name: str, where: dict[str, int]) -> None:
        """Enter a range."""
        entered = record_function(label(name, where))
        entered.__enter__()  # type: ignore[no-untyped-call]
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        self._threads.stack.append(entered)

    def end(self, name: str) -> None:
        """Leave it."""
        self._threads.stack.pop().__exit__(None, None, None)


class ProfilerWindow(StepSpans):
    """Profiles a few steps with ``torch.profiler``, the parts of a step named as in :mod:`megalight.parallel.trace`.

    Each window and rank leaves ``steps=A-B-rank=R.json.gz`` (for Perfetto, or ``chrome://tracing``) and a table of the
    costliest operators, ``steps=A-B-rank=R.txt``, in ``profile`` under the trainer's root folder.

    Args:
        start_step: the first optimizer step in the window; training begins with step 0.
        stop_step: the first one after it.
        every_n_steps: from one window's start to the next one's; null: one window.
        warmup: steps before the window in which the profiler runs and nothing is kept: its own start is slow.
        ranks: which ranks profile.
        rows: of the table.
        shapes: keep operators' input shapes.
        stacks: keep the Python stack of every operator (slow).
        memory: keep allocations.
        dirpath: where to write; null: ``profile`` in the trainer's ``default_root_dir``.

    Attributes:
        traces: what was written so far, on this rank.

    Raises:
        ConfigurationError: windows that are empty or overlap.
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
            raise ConfigurationError(f"warmup={warmup}, rows={rows}: warmup must be at least 0, rows at least 1.")
        self.window = StepWindow(start_step, stop_step, every_n_steps)
        if every_n_steps is not None and every_n_steps < self.window.steps + warmup:
            raise ConfigurationError(
                f"every_n_steps is {every_n_steps}; a window of {self.window.steps} steps with {warmup} of warm-up "
                f"needs at least {self.window.steps + warmup}."
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
        """Ranges on the ranks that profile."""
        return Annotations() if trainer.global_rank in self.ranks else None

    def _listen(self, trainer: pl.Trainer) -> None:
        """Only in windows."""
        if self._profiler is not None:
            super()._listen(trainer)

    def _begin(self, name: str) -> None:
        if self._profiler is not None:
            super()._begin(name)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin, before the first step of warm-up."""
        step = trainer.global_step
        if self._listener is not None and self._profiler is None and self.window.begins(step, self.warmup):
            warmup = self.window.start - step if step <= self.window.start else self.warmup
            self._first, self._step = step + warmup, step
            self._profiler = self._start(trainer, warmup)
            self._listen(trainer)
        self._seen = step
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End, after the window's last step."""
        self._end_all()
        if self._profiler is None:
            return
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            if self._step == self._first + self.window.steps:
                self._write(trainer)
                return
            self._profiler.step()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what there is."""
        self._end_all()
        self._write(trainer)
        super().on_train_end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write what there is: it may show why."""
        self._end_all()
        self._write(trainer)
        super().on_exception(trainer, pl_module, exception)

    def _start(self, trainer: pl.Trainer, warmup: int) -> profile:
        activities = [ProfilerActivity.CPU]
        if trainer.strategy.root_device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities,
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
        profiler.stop()
        if self._seen < self._first:
            log.warning("training ended in the profiler's warm-up, before step %d: nothing to write.", self._first)
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
