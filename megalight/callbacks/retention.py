"""Which checkpoints of a run are kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl

from megalight import checkpoint
from megalight.checkpoint.disk.files import PathLike
from megalight.checkpoint.disk.publish import finished, place
from megalight.errors import CheckpointError, ConfigurationError, MegalightError

log = logging.getLogger(__name__)

ENTRY = "retention"
"""Checkpoints hold the monitored metric under this name, so that later runs can compare it."""


@dataclass(frozen=True)
class KeptCheckpoint:
    """A finished checkpoint.

    Attributes:
        path: its folder.
        step: optimizer steps when it was saved.
        metric: the monitored metric when it was saved, or None.
    """

    path: PathLike
    step: int
    metric: float | None


class Retention(pl.Callback):
    """Removes checkpoints that no rule keeps, after each new one is complete.

    A checkpoint is kept if one of the rules keeps it. All finished checkpoints in the folder of the new one count, also
    those of earlier runs, except ``last*``, which is never removed. Use it with ``ModelCheckpoint(save_top_k=-1)``,
    which removes none itself. A checkpoint that another process reads is removed later.

    Args:
        last: keep this many of the newest.
        best: keep this many of the best by ``monitor``.
        monitor: name of a logged metric.
        mode: whether a small or a large metric is good.
        every_n_steps: keep those whose step is a multiple of this.
        milestones: keep those of these steps.

    Raises:
        ConfigurationError: an argument is out of range, or ``best`` is given without ``monitor``.
    """

    def __init__(
        self,
        last: int = 1,
        best: int = 0,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        every_n_steps: int | None = None,
        milestones: Sequence[int] = (),
    ) -> None:
        if last < 1 or best < 0 or (every_n_steps is not None and every_n_steps < 1):
            raise ConfigurationError(
                f"last is {last}, best is {best}, every_n_steps is {every_n_steps}; last must be at least 1, because a "
                "run resumes from the newest, best at least 0, every_n_steps at least 1."
            )
        if mode not in ("min", "max"):
            raise ConfigurationError(f"mode is {mode!r}; it must be min or max.")
        if best and monitor is None:
            raise ConfigurationError(f"best is {best}; name the metric by which checkpoints are compared (monitor).")
        self.last = last
        self.best = best
        self.monitor = monitor
        self.mode = mode
        self.every_n_steps = every_n_steps
        self.milestones = frozenset(milestones)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the metric into the checkpoint."""
        value = None if self.monitor is None else trainer.callback_metrics.get(self.monitor)
        checkpoint[ENTRY] = {"monitor": self.monitor, "metric": None if value is None else float(value)}

    def on_checkpoint_written(self, trainer: pl.Trainer, pl_module: pl.LightningModule, path: str) -> None:
        """Remove what no rule keeps, on rank 0. The strategy calls this when a checkpoint is complete."""
        # A checkpoint `last` comes beside one with a number, and says nothing new.
        if not trainer.is_global_zero or place(path).name.startswith("last"):
            return
        try:
            removable = self.removable(place(path).parent)
        except (MegalightError, OSError) as error:  # on one rank alone, which must not leave the others
            log.warning("no checkpoint is removed until the next one is written: %s", error)
            return
        for each in removable:
            # By the strategy, so that other callbacks hear of it.
            trainer.strategy.remove_checkpoint(str(each.path))
            log.info("removed %s (step %d)", each.path, each.step)

    def removable(self, folder: PathLike) -> list[KeptCheckpoint]:
        """Return the finished checkpoints of a folder that no rule keeps, oldest first."""
        found = [kept for path in finished(folder) if not path.name.startswith("last") for kept in self._read(path)]
        keep = {each.path for each in found[-self.last :]}
        keep |= {each.path for each in found if each.step in self.milestones}
        if self.every_n_steps is not None:
            keep |= {each.path for each in found if each.step % self.every_n_steps == 0}
        # NaN is not equal to itself, and compares with nothing.
        measured = [each for each in found if each.metric is not None and each.metric == each.metric]
        measured.sort(key=lambda each: (each.metric or 0.0) * (1 if self.mode == "min" else -1))
        keep |= {each.path for each in measured[: self.best]}
        # links (ModelCheckpoint's last.ckpt may be one) keep what they lead to
        keep |= {link.resolve() for link in folder.iterdir() if link.is_symlink()}
        return [each for each in found if each.path not in keep and each.path.resolve() not in keep]

    def _read(self, path: PathLike) -> list[KeptCheckpoint]:
        """Return a checkpoint's step and metric; nothing if it is damaged, of something else, or just removed."""
        try:
            common = checkpoint.open(path).common
        except (CheckpointError, OSError):  # on one rank alone, which must not leave the others
            return []
        noted = common.get(ENTRY, {})
        step = common.get("global_step")
        # A metric of another name cannot be compared.
        metric = noted.get("metric") if noted.get("monitor") == self.monitor else None
        return [KeptCheckpoint(path, step, metric)] if isinstance(step, int) else []
