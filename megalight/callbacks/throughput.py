"""Throughput: the speed of training, the time of each part of a step, and the ranks that make the others wait."""

from __future__ import annotations

import logging
import os
import platform
import time
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import lightning.pytorch as pl
import torch.distributed as dist

from megalight.callbacks.meter import StepMeter, rates
from megalight.callbacks.step_timing import LEVELS, OFF, StepSpans, Timer, TimerTable, Times, check_level
from megalight.errors import ConfigurationError
from megalight.strategies.mesh_strategy import Collectives

log = logging.getLogger(__name__)

T = TypeVar("T")

COMPUTE = ("forward", "backward", "input_gradient", "weight_gradient")
"""Spans whose device time is a rank's own work, except for pipeline receives inside them."""
SHOWN = 3
"""Slow ranks that a warning names."""
REDUCTIONS: dict[str, Any] = {
    "max": lambda values: {"": max(values.values())},
    "minmax": lambda values: {"_min": min(values.values()), "_max": max(values.values())},
    "all": lambda values: {f"_rank{rank}": value for rank, value in values.items()},
}


class Throughput(StepSpans):
    """Logs the mean speed of training every few steps, without validation, to every logger.

    On request it also times the parts of a step and compares the ranks. Nothing waits for the device: times come from
    its events. A row of speeds is written about a step late, a row of parts a window late, each under the step that it
    belongs to.

    FLOPs come from the module's ``flops_per_token(sequence_length)``: six per matmul parameter, and causal attention.
    Metrics that cannot be known (FLOPs of another model, peak of a device) are not logged.

    ``timers`` is the finest level of parts. Level 0 times ``step``, ``data`` (waiting for batches), ``optimizer`` and
    ``checkpoint``. Level 1 adds the forward and backward passes, and the gradient reduction that is left after them.
    Level 2 adds pipeline receives, single buckets, clipping and gathering (see :data:`megalight.parallel.trace.SPANS`).
    Work inside a replayed CUDA graph has no events and is not timed.

    ``stragglers`` compares the ranks of each pipeline stage by their own work: the device time of forward and backward
    passes without pipeline receives. Tensor, context and data-parallel collectives inside these passes count, so a slow
    rank slows down its whole tensor-parallel group, and the whole group shows up. Rank 0 warns, with host names, of
    ranks that take ``stragglers`` times the median of the others or more.

    Logs:
        tokens_per_s: tokens per second on all devices.
        tokens_per_s_per_device: the same, divided by the number of devices.
        tflop_per_s_per_device: FLOPs of the model per second and device, in 10^12. Recomputation does not count.
        mfu_percent: ``tflop_per_s_per_device`` as a share of the device's peak.
        step_time_s: seconds per optimizer step.
        data_wait_percent: share of the time in which the host waited for batches.
        memory_gib: highest memory use so far; allocated on GPUs, resident on CPUs.
        time/<part>_s: with ``timers``: seconds per step of a part. By ``ranks``, ``_min``, ``_max`` or ``_rank<r>``
            comes before ``_s``.
        time/first/<part>_s: the same for the first step, which is in no mean.
        startup/<part>_s: with ``timers``: seconds that the run needed to start (see
            :func:`megalight.callbacks.throughput.startup_spans`).
        straggler/rank: with ``stragglers``: the slowest rank relative to its pipeline stage.
        straggler/ratio: its time divided by the median of the other ranks of the stage.
        straggler/seconds: its seconds per step.
        straggler/median_s: seconds per step of the median of the others.

    Args:
        peak_tflops: peak of one device, for ``mfu_percent``. None: looked up by the name of the device; CPUs have none.
        timers: 0, 1 or 2: time the parts of a step. None: no parts.
        ranks: how the times of all ranks are logged: ``max``; ``minmax``, as ``<part>_min_s`` and ``<part>_max_s``; or
            ``all``, as ``<part>_rank<r>_s``.
        stragglers: compare the ranks, and warn from this ratio on; above 1, such as 1.15. None: do not.
        every_n_steps: optimizer steps in a window. None: the trainer's ``log_every_n_steps``.

    Attributes:
        slowest: the slowest ranks of the last window, slowest first, on rank 0.

    Raises:
        ConfigurationError: an argument is out of range, or ``ranks`` is given without ``timers``.
    """

    during_validation = False

    def __init__(
        self,
        peak_tflops: float | None = None,
        timers: int | None = None,
        ranks: Literal["max", "minmax", "all"] = "max",
        stragglers: float | None = None,
        every_n_steps: int | None = None,
    ) -> None:
        super().__init__()
        if peak_tflops is not None and peak_tflops <= 0:
            raise ConfigurationError(f"peak_tflops is {peak_tflops}; it must be above 0, or null to look it up.")
        if timers is not None:
            check_level(timers)
        if ranks not in REDUCTIONS:
            raise ConfigurationError(f"ranks is {ranks!r}; choose one of {', '.join(REDUCTIONS)}.")
        if ranks != "max" and timers is None:
            raise ConfigurationError(f"ranks is {ranks!r}, but no parts are timed; set timers to 0, 1 or 2.")
        if stragglers is not None and stragglers <= 1:
            raise ConfigurationError(f"stragglers is {stragglers}; it must be above 1, or null to compare no ranks.")
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(
                f"every_n_steps is {every_n_steps}; it must be at least 1, or null for log_every_n_steps."
            )
        self.peak_tflops = peak_tflops
        self.timers = timers
        self.ranks = ranks
        self.stragglers = stragglers
        self.every_n_steps = every_n_steps
        self.slowest: list[SlowRank] = []
        self._stamps = {"program": program_start(), "entry": time.time()}
        self._meter: StepMeter | None = None
        self._gather: HostGather | None = None
        self._table: TimerTable | None = None
        self._pending: Times | None = None
        self._closed = 0
        self._first = True

    def timer(self, name: str, level: int = 1) -> Timer:
        """Return a timer for your own code, which is logged like the parts.

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

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start measuring."""
        super().on_train_start(trainer, pl_module)
        # Other ranks take as long, so one rank measures the speed.
        self._meter = StepMeter(trainer.strategy.root_device) if trainer.is_global_zero else None
        if self._meter is not None:
            self._meter.start(trainer.global_step, trainer)

    def listener(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> TimerTable | None:
        """Create new timers, and log the time that the run needed to start; None: no parts are timed."""
        if self.timers is None and self.stragglers is None:
            return None
        self._gather = HostGather(trainer)
        self._pending, self._closed, self._first = None, trainer.global_step, True
        # The own work of ranks is timed at any level.
        work = {} if self.stragglers is None else dict.fromkeys((*COMPUTE, "receive"), 0)
        levels = LEVELS if self.timers is not None else {}
        self._table = TimerTable(trainer.strategy.root_device, self.timers or 0, {**levels, **work})
        # Before the first step, after everything that a start includes.
        if self.timers is not None and "train" not in self._stamps:  # only for the first fit of this process
            self._stamps["train"] = time.time()
            figures = startup_spans(self._gather(self._stamps))
            _log_row(trainer, {f"startup/{name}": value for name, value in figures.items()}, trainer.global_step)
        return self._table

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and log windows that the device has finished."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        every = int(self.every_n_steps or trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if self._meter is not None:
            self._meter.add(trainer, batch)
            if every and self._meter.due(trainer, every):
                self._meter.close(trainer.global_step, {})
            self._log_speed(trainer, pl_module)
        if self._table is not None:
            # Old events are read as they pass. A long window would hold thousands otherwise.
            self._table.settle()
            self._close_window(trainer, max(every, 1))

    def _close_window(self, trainer: pl.Trainer, every: int) -> None:
        """Close the window of parts if it has enough steps. It is reported when the next one closes.

        By then the device has finished it, unless the host is more than a whole window ahead. The first step of
        training (allocations, compilation, the first collectives) is a window of its own.
        """
        steps = trainer.global_step - self._closed
        if self._table is not None and steps and (self._first or steps >= every):
            self._report(trainer)
            self._end_all()
            self._pending = self._table.close(trainer.global_step, steps, self._first)
            self._begin("data")
            self._closed, self._first = trainer.global_step, False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clocks: validation is not training time."""
        super().on_validation_start(trainer, pl_module)
        if self._meter is not None:
            self._meter.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restart the clocks."""
        super().on_validation_end(trainer, pl_module)
        if self._meter is not None:
            self._meter.resume()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the last windows."""
        self._log_speed(trainer, pl_module, wait=True)
        self._report(trainer)
        super().on_train_end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop measuring. Nothing is reported: other ranks and the device may have failed."""
        self._open.clear()
        super().on_exception(trainer, pl_module, exception)

    def _finish(self) -> None:
        super()._finish()
        self._table = None
        if self._meter is not None:
            self._meter.stop()
            self._meter = None

    def _log_speed(self, trainer: pl.Trainer, module: pl.LightningModule, wait: bool = False) -> None:
        # Several windows may have ended since the last call.
        while self._meter is not None and (window := self._meter.poll(wait)) is not None:
            _log_row(trainer, rates(window, trainer, module, self.peak_tflops), window.step - 1)

    def _report(self, trainer: pl.Trainer) -> None:
        """Log the window of parts that was closed last."""
        times, self._pending = self._pending, None
        if times is None:
            return
        assert self._gather is not None
        mesh = getattr(trainer.strategy, "mesh", None)
        stage = 0 if mesh is None else int(mesh.rank("pp"))
        seconds = times.seconds()
        # A collective on the host, in the same step on all ranks.
        rows = self._gather((seconds, own_work(trainer, seconds, stage)))
        if not trainer.is_global_zero:
            return
        if self.timers is not None:
            self._log_parts(trainer, times, [parts for parts, _ in rows])
        # The first step has allocations and compilation, which differ between ranks.
        if self.stragglers is not None and not times.first:
            self._compare(trainer, times, [work for _, work in rows], self.stragglers)

    def _log_parts(self, trainer: pl.Trainer, times: Times, rows: list[dict[str, float]]) -> None:
        assert self.timers is not None
        prefix = "time/first/" if times.first else "time/"
        # Pipeline stages have other parts: the first one receives no activations.
        names = dict.fromkeys(name for row in rows for name in row if LEVELS.get(name, 0) <= self.timers)
        figures: dict[str, float] = {}
        for name in names:
            by_rank = {rank: row[name] for rank, row in enumerate(rows) if name in row}
            figures |= {f"{prefix}{name}{suffix}_s": value for suffix, value in REDUCTIONS[self.ranks](by_rank).items()}
        _log_row(trainer, figures, times.step - 1)

    def _compare(self, trainer: pl.Trainer, times: Times, workers: list[RankWork], warn_ratio: float) -> None:
        """Log the slowest rank, and warn if it is too slow."""
        self.slowest = slowest(workers)[:SHOWN]
        if not self.slowest:
            return
        worst = self.slowest[0]
        figures = {
            "straggler/rank": float(worst.worker.rank),
            "straggler/ratio": worst.ratio,
            "straggler/seconds": worst.worker.seconds,
            "straggler/median_s": worst.median,
        }
        _log_row(trainer, figures, times.step - 1)
        if worst.ratio >= warn_ratio:
            named = "; ".join(
                f"rank {slow.worker.rank} on {slow.worker.place} takes {slow.worker.seconds:.3g} s, {slow.ratio:.2f} x "
                f"the median of the others of its stage"
                for slow in self.slowest
                if slow.ratio >= warn_ratio
            )
            log.warning("slow ranks in steps %d to %d: %s.", times.step - times.steps, times.step - 1, named)


def _log_row(trainer: pl.Trainer, row: dict[str, float], step: int) -> None:
    """On rank 0: write metrics to every logger, under the step that they belong to."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(row, step=step)


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


def startup_spans(stamps: list[dict[str, float]]) -> dict[str, float]:
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


class RankWork(NamedTuple):
    """The work of one rank in a window.

    Attributes:
        rank: global rank.
        seconds: time of its own work, per step.
        stage: pipeline rank. Only ranks of one stage have equal work.
        place: host and local rank.
    """

    rank: int
    seconds: float
    stage: int
    place: str


@dataclass(frozen=True)
class SlowRank:
    """A rank compared with the other ranks of its pipeline stage.

    Attributes:
        worker: the rank.
        ratio: its time divided by the median of the other ranks; 1 if there are no others.
        median: the median of the other ranks in seconds; its own time if there are no others.
    """

    worker: RankWork
    ratio: float
    median: float


def own_work(trainer: pl.Trainer, seconds: dict[str, float], stage: int) -> RankWork:
    """Return this rank's own work from the seconds of its spans."""
    # Waiting for a neighbor is not a rank's own work.
    own = sum(seconds.get(name, 0.0) for name in COMPUTE) - seconds.get("receive", 0.0)
    return RankWork(trainer.global_rank, own, stage, f"{platform.node()}/{trainer.local_rank}")


def slowest(workers: list[RankWork]) -> list[SlowRank]:
    """Return ranks by their ratio to the median of the others of their stage, slowest first.

    Ranks whose others have no work are left out.
    """
    stages: dict[int, list[float]] = {}
    # Sorted once for each stage, so that a median without one rank is a look at two places.
    for worker in sorted(workers, key=lambda worker: worker.seconds):
        stages.setdefault(worker.stage, []).append(worker.seconds)
    medians = [median_of_others(stages[worker.stage], worker.seconds) for worker in workers]
    found = [
        SlowRank(worker, worker.seconds / median, median)
        for worker, median in zip(workers, medians, strict=True)
        if median > 0
    ]
    return sorted(found, key=lambda slow: (-slow.ratio, slow.worker.rank))


def median_of_others(ordered: list[float], one: float) -> float:
    """Return the median of the sorted list ``ordered`` without the value ``one``; ``one`` itself if it is alone."""
    others = len(ordered) - 1
    if not others:
        return one
    out = bisect_left(ordered, one)
    low, high = (ordered[at + (at >= out)] for at in ((others - 1) // 2, others // 2))
    return (low + high) / 2
