"""Saves the last step of a run, however the run ends."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from megalight.callbacks.preemption import Preemption
from megalight.strategies import _lightning
from megalight.strategies.checkpoints.hooks import FolderCheckpoints

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
