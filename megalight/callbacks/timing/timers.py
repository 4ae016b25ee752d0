"""Logs the time of each part of a step, over all ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl

from megalight.callbacks.timing.step_timing import OFF, TimedSteps, Timer, TimerTable, Times, check_level, log_row
from megalight.errors import ConfigurationError

# The time that a run needs to start.


IMPORTED = time.time()
"""When this module was imported."""


def program_start() -> float:
    """Return the start of this process in seconds since the epoch (to 10 ms). Not on Linux: :data:`IMPORTED`."""
    try:
        # After the name of the program, which is in brackets and may contain blanks.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = float(fields[19]) / os.sysconf("SC_CLK_TCK")  # seconds since the machine was started
        return time.time() - (float(Path("/proc/uptime").read_text().split()[0]) - ticks)
    except (OSError, ValueError, IndexError):
        return IMPORTED


def spans(stamps: list[dict[str, float]]) -> dict[str, float]:
    """Return the durations between the time stamps ``program``, ``entry``, ``fit`` and ``train`` of all ranks.

    - ``ranks_apart_s``: from the start of the first process to the start of the last.
    - ``program_s``: until imports and constructors are done on the last rank.
    - ``launch_s``: then until the last rank is in ``fit`` with its process group.
    - ``setup_s``: then until model, data and optimizer are ready on the last rank.
    - ``all_s``: the whole time.
    """
    first = min(stamp["program"] for stamp in stamps)
    last = {name: max(stamp[name] for stamp in stamps) for name in ("program", "entry", "fit", "train")}
    return {
        "ranks_apart_s": last["program"] - first,
        "program_s": last["entry"] - first,
        "launch_s": last["fit"] - last["entry"],
        "setup_s": last["train"] - last["fit"],
        "all_s": last["train"] - first,
    }


class Timers(TimedSteps):
    """Logs the seconds per step of each part of a step, every few steps, to every logger.

    Level 0 times ``step``, ``data`` (waiting for batches), ``optimizer`` and ``checkpoint``. Level 1 adds the forward
    and backward passes, and the gradient reduction that is left after them. Level 2 adds pipeline receives, single
    buckets, clipping and gathering (see :data:`megalight.parallel.trace.SPANS`). Times are device times from events; no
    step waits for them. Rows are logged a window late, under the step they belong to. Work inside a replayed CUDA graph
    has no events and is not timed.

    Args:
        level: 0, 1 or 2.
        ranks: how the values of all ranks are logged: ``max``; ``minmax``, as ``<name>_min_s`` and ``<name>_max_s``; or
            ``all``, as ``<name>_rank<r>_s``.
        every_n_steps: optimizer steps in the mean of a row. null: the trainer's ``log_every_n_steps``.

    Logs:
        time/<part>_s: seconds per step of a part. By ``ranks``, ``_min``, ``_max`` or ``_rank<r>`` comes before ``_s``.
        time/first/<part>_s: the same for the first step, which is in no mean.
        startup/<part>_s: seconds that the run needed to start (see :func:`megalight.callbacks.timing.timers.spans`).

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(
        self, level: int = 1, ranks: Literal["max", "minmax", "all"] = "max", every_n_steps: int | None = None
    ) -> None:
        super().__init__(check_level(level), every_n_steps)
        if ranks not in REDUCTIONS:
            raise ConfigurationError(f"ranks is {ranks!r}; choose one of {', '.join(REDUCTIONS)}.")
        self.ranks = ranks
        self._stamps = {"program": program_start(), "entry": time.time()}

    def timer(self, name: str, level: int = 1) -> Timer:
        """Return a timer for your own code, which is logged like the others.

        It does nothing if its level is off or no training runs. Code that does not have this callback can use
        :func:`megalight.parallel.trace.span` instead.

        Raises:
            ConfigurationError: the level does not exist.
        """
        check_level(level)
        return OFF if self._table is None else self._table.timer(name, level)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Record when ``fit`` began."""
        if stage == "fit":
            self._stamps.setdefault("fit", time.time())

    def listener(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> TimerTable:
        """Create new timers, and log the time that the run needed to start."""
        table = super().listener(trainer, pl_module)
        # Before the first step, after everything that a start includes.
        if "train" not in self._stamps:  # only for the first fit of this process
            self._stamps["train"] = time.time()
            assert self._gather is not None
            figures = spans(self._gather(self._stamps))
            if trainer.is_global_zero:
                log_row(trainer, {f"startup/{name}": value for name, value in figures.items()}, trainer.global_step)
        return table

    def report(self, trainer: pl.Trainer, times: Times, rows: list[Any]) -> None:
        """Log a window."""
        prefix = "time/first/" if times.first else "time/"
        # Pipeline stages have other parts: the first one receives no activations.
        names = dict.fromkeys(name for row in rows for name in row)
        figures: dict[str, float] = {}
        for name in names:
            by_rank = {rank: row[name] for rank, row in enumerate(rows) if name in row}
            figures |= {f"{prefix}{name}{suffix}_s": value for suffix, value in REDUCTIONS[self.ranks](by_rank).items()}
        log_row(trainer, figures, times.step - 1)

    def _finish(self) -> None:
        super()._finish()
        self._table = None


REDUCTIONS: dict[str, Any] = {
    "max": lambda values: {"": max(values.values())},
    "minmax": lambda values: {"_min": min(values.values()), "_max": max(values.values())},
    "all": lambda values: {f"_rank{rank}": value for rank, value in values.items()},
}
