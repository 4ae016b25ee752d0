"""How a run stops: by a signal of the cluster, and with its last step saved."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from megalight.checkpoint.disk.files import PathLike
from megalight.checkpoint.disk.publish import place
from megalight.errors import ConfigurationError, integer
from megalight.strategies import _lightning
from megalight.strategies.checkpoints.hooks import FolderCheckpoints

log = logging.getLogger(__name__)


class Preemption(pl.Callback):
    """On SIGTERM or SIGUSR1, saves a checkpoint at the next common step boundary and stops training.

    The signal handler only sets a flag: collectives and files are not safe inside it. Every ``every_n_steps`` optimizer
    steps, the ranks combine their flags through host memory. So one process that gets the signal is enough, and all
    ranks stop at the same step. The checkpoint ``last-preempted-step=N.ckpt`` lies in the folder of ModelCheckpoint,
    where ``ckpt_path="last"`` finds it.

    Args:
        signals: names of the signals to handle.
        every_n_steps: optimizer steps between checks. Together with one save, they must fit into the grace period of
            the cluster.
        dirpath: folder to save to. None: the folder of ModelCheckpoint, else ``checkpoints`` in the log folder.
        after_minutes: stop as if by a signal, so long after this object was made: for clusters that end a job at its
            time limit without one. Leave room for ``every_n_steps`` steps and one save. None: no limit.

    Attributes:
        preempted: whether a signal or the limit stopped training.
        saved: path of the checkpoint, or None.

    Raises:
        ConfigurationError: ``every_n_steps`` is below 1, ``after_minutes`` is not above 0, or a signal is unknown.
    """

    def __init__(
        self,
        signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1"),
        every_n_steps: int = 10,
        dirpath: str | None = None,
        after_minutes: float | None = None,
    ) -> None:
        integer("every_n_steps", every_n_steps)
        if after_minutes is not None and after_minutes <= 0:
            raise ConfigurationError(f"after_minutes is {after_minutes}; it must be above 0, or null for no limit.")
        unknown = [name for name in signals if name not in signal.Signals.__members__]
        if unknown:
            raise ConfigurationError(f"signals has {unknown[0]!r}, which is no signal; use names such as SIGTERM.")
        self.signals = tuple(signal.Signals[name] for name in signals)
        self.every_n_steps = every_n_steps
        self.dirpath = dirpath
        self._end = None if after_minutes is None else time.monotonic() + 60 * after_minutes
        self.preempted = False
        self.saved: str | None = None
        self._told = False
        self._checked = 0
        self._limit_val_batches: int | float = 1.0
        self._before: dict[signal.Signals, Any] = {}
        self._group: dist.ProcessGroup | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace Lightning's signal handlers, which save and communicate inside the handler."""
        self.preempted, self.saved, self._told, self._checked = False, None, False, trainer.global_step
        # Signals are checked on the host: a device collective would wait for all queued steps.
        if trainer.world_size > 1 and self._group is None and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")
        # Python allows handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self.signals}
        else:
            log.warning("Preemption cannot handle signals outside of the main thread, so it does nothing here.")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Every few optimizer steps, check the flags of all ranks; save and stop if one is set."""
        if trainer.global_step - self._checked < self.every_n_steps or self.preempted:
            return
        # By steps, not by batches: all ranks come here at the same step.
        self._checked = trainer.global_step
        if not self._agree(trainer):
            return
        self.preempted = True
        self.saved = str(self._folder(trainer) / f"last-preempted-step={trainer.global_step}.ckpt")
        beside = trainer.strategy if isinstance(trainer.strategy, FolderCheckpoints) else None
        if beside is not None:
            beside.finish_saves()  # or this save might be left out, because another is under way
        trainer.save_checkpoint(self.saved)
        if beside is not None:
            beside.finish_saves()  # no other process hears of a checkpoint before it is published
        trainer.should_stop = True
        # Lightning would continue until it reaches these minima.
        trainer.fit_loop.epoch_loop.min_steps = trainer.fit_loop.min_epochs = None
        self._limit_val_batches = trainer.limit_val_batches
        trainer.limit_val_batches = 0  # Lightning validates when it stops; there is no time for that
        if trainer.is_global_zero:
            why = "a signal" if self._told else "a signal to another rank, or the time limit"
            log.warning("stopped by %s: saved %s; resume with --ckpt_path=last or with this path.", why, self.saved)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the signal handlers."""
        self._restore()
        if self.preempted:
            trainer.limit_val_batches = self._limit_val_batches

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the signal handlers."""
        self._restore()

    def _handle(self, number: int, frame: Any) -> None:
        # Nothing else: code in a handler may interrupt a collective or a write.
        self._told = True

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that Python has not set.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _agree(self, trainer: pl.Trainer) -> bool:
        # Clocks differ, but ranks agree: the first one whose time is over stops all.
        mine = self._told or (self._end is not None and time.monotonic() >= self._end)
        if trainer.world_size == 1:
            return mine
        told = torch.tensor(int(mine))
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
        return bool(told)

    def _folder(self, trainer: pl.Trainer) -> PathLike:
        if self.dirpath is not None:
            return place(self.dirpath)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath:
                return place(callback.dirpath)
        return place(trainer.log_dir or trainer.default_root_dir) / "checkpoints"


ASKED = b"\nstopping after this step, and saving it; press Ctrl-C again to stop at once\n"


class FinalCheckpoint(pl.Callback):
    """Saves the last step of a run when it ends, unless a ModelCheckpoint has saved this step.

    A run may be complete, be stopped by a callback or SIGTERM, or be interrupted by Ctrl-C, which ends it after the
    step that is running; a second Ctrl-C ends it at once. The first ModelCheckpoint that saves more than weights does
    it, with its names and its ``save_last``. Where it compares metrics, what it keeps by them stays as it is. Nothing
    is saved after an error, under ``fast_dev_run``, after ``Preemption`` has saved, or without a ModelCheckpoint.

    The ``megalight`` command adds it to each run.

    Attributes:
        interrupted: whether Ctrl-C ended training.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._began_at = 0
        self._before: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the step, and let Ctrl-C end the run after a step."""
        self.interrupted, self._began_at = False, trainer.global_step
        # Python allows handlers in the main thread only. Another handler than Python's own is somebody's.
        if threading.current_thread() is threading.main_thread() and self._savers(trainer):
            self._before = signal.getsignal(signal.SIGINT)
            if self._before is signal.default_int_handler:
                signal.signal(signal.SIGINT, lambda *_: self._ask(trainer))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last step."""
        self._restore()
        self._save(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save the last step if a signal ended the run, which all ranks do after the same step."""
        self._restore()
        if isinstance(exception, _lightning.SIGTERMException):
            self._save(trainer)

    def _ask(self, trainer: pl.Trainer) -> None:
        self._restore()
        self.interrupted = True
        os.write(2, ASKED)  # no buffer: the signal may have come while one is written
        _lightning.end_after_step(trainer)

    def _restore(self) -> None:
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._before)
        self._before = None

    def _savers(self, trainer: pl.Trainer) -> list[ModelCheckpoint]:
        savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        return [each for each in savers if not each.save_weights_only] or savers

    def _save(self, trainer: pl.Trainer) -> None:
        savers = self._savers(trainer)
        if not savers or trainer.fast_dev_run or trainer.global_step == self._began_at:  # type: ignore[attr-defined]
            return
        if any(isinstance(each, Preemption) and each.preempted for each in trainer.callbacks):  # type: ignore[attr-defined]
            return
        if any(map(_lightning.has_saved, savers, [trainer] * len(savers))):
            return
        beside = trainer.strategy if isinstance(trainer.strategy, FolderCheckpoints) else None
        if beside is not None:
            beside.finish_saves()  # or this save might be left out, because another is under way
        path = _lightning.save_last_step(savers[0], trainer)
        if beside is not None:
            beside.finish_saves()
        rank_zero_info(f"saved the last step ({trainer.global_step}): {path}")
