"""Save and stop cleanly when the cluster says so."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight.errors import ConfigurationError

log = logging.getLogger(__name__)


class Preemption(pl.Callback):
    """On SIGTERM or SIGUSR1: save a checkpoint at the next agreed step boundary, then stop training in good order.

    The signal handler only raises a flag: no collective and no file is touched inside it. Every ``every_n_steps``
    optimizer steps all ranks agree, through host memory, whether any of them has been told to stop; so it is enough
    that one process gets the signal, and all stop at the same step. The checkpoint is called
    ``last-preempted-step=N.ckpt`` and lies in ModelCheckpoint's folder, so that ``ckpt_path="last"`` finds it.

    Args:
        signals: names of the signals to heed.
        every_n_steps: optimizer steps between agreements; the time that they take must fit the cluster's grace period.
        dirpath: where to save; None: ModelCheckpoint's folder, else ``checkpoints`` in the log folder.

    Attributes:
        preempted: whether training was stopped by a signal.
        saved: the checkpoint's path; None before.
    """

    def __init__(
        self, signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1"), every_n_steps: int = 10, dirpath: str | None = None
    ) -> None:
        if every_n_steps < 1:
            raise ConfigurationError(f"every_n_steps is {every_n_steps}; it must be at least 1.")
        unknown = [name for name in signals if name not in signal.Signals.__members__]
        if unknown:
            raise ConfigurationError(f"signals has {unknown[0]!r}; use names of signals such as SIGTERM or SIGUSR1.")
        self.signals = tuple(signal.Signals[name] for name in signals)
        self.every_n_steps = every_n_steps
        self.dirpath = dirpath
        self.preempted = False
        self.saved: str | None = None
        self._told = False
        self._checked = 0
        self._limit_val_batches: int | float = 1.0
        self._before: dict[signal.Signals, Any] = {}
        self._group: dist.ProcessGroup | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals over from Lightning, whose handlers save and talk to other ranks on the spot."""
        self.preempted, self.saved, self._told, self._checked = False, None, False, trainer.global_step
        if trainer.world_size > 1 and self._group is None and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self.signals}
        else:
            log.warning("signals reach the main thread only; Preemption cannot heed them here.")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Every few optimizer steps: agree; save and stop if any rank was told."""
        if trainer.global_step - self._checked < self.every_n_steps or self.preempted:
            return
        self._checked = trainer.global_step
        if not self._agree(trainer):
            return
        self.preempted = True
        self.saved = str(self._folder(trainer) / f"last-preempted-step={trainer.global_step}.ckpt")
        trainer.save_checkpoint(self.saved)
        trainer.should_stop = True
        trainer.fit_loop.epoch_loop.min_steps = trainer.fit_loop.min_epochs = (
            None  # they would keep a stopped run going
        )
        self._limit_val_batches = trainer.limit_val_batches
        trainer.limit_val_batches = 0  # no time for the validation that Lightning runs when it stops
        if trainer.is_global_zero:
            log.warning("told to stop: saved %s; resume with --ckpt_path=last or that path.", self.saved)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the signals back."""
        self._restore()
        if self.preempted:
            trainer.limit_val_batches = self._limit_val_batches

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the signals back."""
        self._restore()

    def _handle(self, number: int, frame: Any) -> None:
        self._told = True

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _agree(self, trainer: pl.Trainer) -> bool:
        if trainer.world_size == 1:
            return self._told
        told = torch.tensor(int(self._told))
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
        return bool(told)

    def _folder(self, trainer: pl.Trainer) -> Path:
        if self.dirpath is not None:
            return Path(self.dirpath)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath:
                return Path(callback.dirpath)
        return Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"
