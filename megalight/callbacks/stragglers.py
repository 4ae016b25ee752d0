"""Which ranks make the others wait."""

from __future__ import annotations

import logging
import platform
from bisect import bisect_left
from dataclasses import dataclass

import lightning.pytorch as pl

from megalight.callbacks.timed_steps import TimedSteps, log_row
from megalight.callbacks.timer import Times
from megalight.errors import ConfigurationError

log = logging.getLogger(__name__)

COMPUTE = ("forward", "backward", "input_gradient", "weight_gradient")
"""Spans whose device time is a rank's own work, but for what it waits in them for neighbours."""
LEVELS = {**dict.fromkeys(COMPUTE, 0), "receive": 0}
"""All that is timed here."""


@dataclass(frozen=True)
class Worker:
    """One rank's part in a window.

    Attributes:
        seconds: of its own work, per step.
        stage: pipeline rank; only ranks of one stage have equal work.
        place: host and local rank.
    """

    rank: int
    seconds: float
    stage: int
    place: str


@dataclass(frozen=True)
class Slow:
    """A rank beside its like.

    Attributes:
        ratio: of its seconds to the median of the other ranks of its pipeline stage; 1 where there are none.
        median: that, seconds; its own where there are no others.
    """

    worker: Worker
    ratio: float
    median: float


class Stragglers(TimedSteps):
    """Compares what a step costs each rank and names the slowest.

    Logged every few steps: ``straggler/rank`` (the one furthest above its like), ``straggler/ratio`` (its time over the
    median of the other ranks of its pipeline stage), ``straggler/seconds`` and ``straggler/median_s``. Where the ratio
    reaches ``warn_ratio``, rank 0 also says so in words, with hosts.

    A rank's time is that of its device in forward and backward passes, less pipeline receives, by events that are read
    a window later. Tensor, context and data-parallel collectives inside those passes are in it: a slow rank slows its
    tensor-parallel group, which then shows as a whole.

    Args:
        every_n_steps: optimizer steps in a window.
        show: how many ranks the warning names.
        warn_ratio: from which ratio on to warn.

    Attributes:
        latest: the slowest ranks of the last window, slowest first, on rank 0.

    Raises:
        ConfigurationError: an argument out of its range.
    """

    levels = LEVELS

    def __init__(self, every_n_steps: int = 50, show: int = 3, warn_ratio: float = 1.15) -> None:
        super().__init__(0, every_n_steps)
        if show < 1 or warn_ratio <= 1:
            raise ConfigurationError(
                f"show={show}, warn_ratio={warn_ratio}: show must be at least 1, the ratio above 1."
            )
        self.show = show
        self.warn_ratio = warn_ratio
        self.latest: list[Slow] = []

    def row(self, trainer: pl.Trainer, seconds: dict[str, float]) -> Worker:
        """This rank's own work."""
        mesh = getattr(trainer.strategy, "mesh", None)
        own = sum(seconds.get(name, 0.0) for name in COMPUTE) - seconds.get("receive", 0.0)
        stage = 0 if mesh is None else int(mesh.rank("pp"))
        return Worker(trainer.global_rank, own, stage, f"{platform.node()}/{trainer.local_rank}")

    def report(self, trainer: pl.Trainer, times: Times, rows: list[Worker]) -> None:
        """Log, and warn."""
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
                f"rank {slow.worker.rank} on {slow.worker.place} {slow.worker.seconds:.3g} s, {slow.ratio:.2f} x the "
                f"median of the others of its stage"
                for slow in self.latest
                if slow.ratio >= self.warn_ratio
            )
            log.warning("slow ranks in steps %d to %d: %s.", times.step - times.steps, times.step - 1, named)


def slowest(workers: list[Worker]) -> list[Slow]:
    """Ranks by their ratio to the median of the others of their stage, slowest first; without stages of no work."""
    stages: dict[int, list[float]] = {}
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
    """The median of ``ordered``, which rises, without ``one`` of its values; that itself where it is alone."""
    others = len(ordered) - 1
    if not others:
        return one
    out = bisect_left(ordered, one)
    low, high = (ordered[at + (at >= out)] for at in ((others - 1) // 2, others // 2))
    return (low + high) / 2
