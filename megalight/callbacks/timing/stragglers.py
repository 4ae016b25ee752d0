"""Finds the ranks that make the others wait."""

from __future__ import annotations

import logging
import platform
from bisect import bisect_left
from dataclasses import dataclass

import lightning.pytorch as pl

from megalight.callbacks.timing.step_timing import TimedSteps, Times, log_row
from megalight.errors import ConfigurationError

log = logging.getLogger(__name__)

COMPUTE = ("forward", "backward", "input_gradient", "weight_gradient")
"""Spans whose device time is a rank's own work, except for pipeline receives inside them."""

LEVELS = {**dict.fromkeys(COMPUTE, 0), "receive": 0}
"""The spans that are timed."""


@dataclass(frozen=True)
class RankWork:
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
class Slow:
    """A rank compared with the other ranks of its pipeline stage.

    Attributes:
        worker: the rank.
        ratio: its time divided by the median of the other ranks; 1 if there are no others.
        median: the median of the other ranks in seconds; its own time if there are no others.
    """

    worker: RankWork
    ratio: float
    median: float


class Stragglers(TimedSteps):
    """Compares the time of a step on all ranks and names the slowest ranks.

    From ``warn_ratio`` on, rank 0 also logs a warning with host names.

    The time of a rank is the device time of its forward and backward passes without pipeline receives, from events that
    are read a window later. It includes tensor, context and data-parallel collectives inside these passes. So a slow
    rank slows down its whole tensor-parallel group, and the whole group shows up.

    Args:
        every_n_steps: optimizer steps in a window.
        show: number of ranks that the warning names.
        warn_ratio: ratio from which on to warn.

    Logs:
        straggler/rank: the slowest rank relative to its pipeline stage.
        straggler/ratio: its time divided by the median of the other ranks of the stage.
        straggler/seconds: its seconds per step.
        straggler/median_s: seconds per step of the median of the others.

    Attributes:
        latest: the slowest ranks of the last window, slowest first, on rank 0.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    levels = LEVELS

    def __init__(self, every_n_steps: int = 50, show: int = 3, warn_ratio: float = 1.15) -> None:
        super().__init__(0, every_n_steps)
        if show < 1 or warn_ratio <= 1:
            raise ConfigurationError(
                f"show is {show} and warn_ratio is {warn_ratio}; show must be at least 1, warn_ratio above 1."
            )
        self.show = show
        self.warn_ratio = warn_ratio
        self.latest: list[Slow] = []

    def row(self, trainer: pl.Trainer, seconds: dict[str, float]) -> RankWork:
        """Return this rank's own work."""
        mesh = getattr(trainer.strategy, "mesh", None)
        # Waiting for a neighbor is not a rank's own work.
        own = sum(seconds.get(name, 0.0) for name in COMPUTE) - seconds.get("receive", 0.0)
        stage = 0 if mesh is None else int(mesh.rank("pp"))
        return RankWork(trainer.global_rank, own, stage, f"{platform.node()}/{trainer.local_rank}")

    def report(self, trainer: pl.Trainer, times: Times, rows: list[RankWork]) -> None:
        """Log the slowest rank, and warn if it is too slow."""
        # The first step has allocations and compilation, which differ between ranks.
        if times.first:
            return
        self.latest = slowest(rows)[: self.show]
        if not self.latest:
            return
        worst = self.latest[0]
        figures = {
            "straggler/rank": float(worst.worker.rank),
            "straggler/ratio": worst.ratio,
            "straggler/seconds": worst.worker.seconds,
            "straggler/median_s": worst.median,
        }
        log_row(trainer, figures, times.step - 1)
        if worst.ratio >= self.warn_ratio:
            named = "; ".join(
                f"rank {slow.worker.rank} on {slow.worker.place} takes {slow.worker.seconds:.3g} s, {slow.ratio:.2f} x "
                f"the median of the others of its stage"
                for slow in self.latest
                if slow.ratio >= self.warn_ratio
            )
            log.warning("slow ranks in steps %d to %d: %s.", times.step - times.steps, times.step - 1, named)


def slowest(workers: list[RankWork]) -> list[Slow]:
    """Return ranks by their ratio to the median of the others of their stage, slowest first.

    Ranks whose others have no work are left out.
    """
    stages: dict[int, list[float]] = {}
    # Sorted once for each stage, so that a median without one rank is a look at two places.
    for worker in sorted(workers, key=lambda worker: worker.seconds):
        stages.setdefault(worker.stage, []).append(worker.seconds)
    medians = [median_of_others(stages[worker.stage], worker.seconds) for worker in workers]
    found = [
        Slow(worker, worker.seconds / median, median)
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
