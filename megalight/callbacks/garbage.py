"""Python's garbage collection, at the same steps on every rank."""

from __future__ import annotations

import gc
import time
from typing import Any

import lightning.pytorch as pl

from megalight.errors import ConfigurationError


class GarbageCollection(pl.Callback):
    """Disables automatic garbage collection during training and collects every few optimizer steps instead.

    Without it each rank collects at another moment, and all other ranks wait for it. With it all ranks collect at the
    same steps. Objects that exist when training starts are frozen (``gc.freeze``), so each collection is short. The
    settings of Python are restored at the end, also after an error.

    Args:
        every_n_steps: optimizer steps between collections.

    Attributes:
        collections: number of collections so far.
        seconds: time spent in them.

    Raises:
        ConfigurationError: ``every_n_steps`` is below 1.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        if every_n_steps < 1:
            raise ConfigurationError(f"every_n_steps is {every_n_steps}; it must be at least 1.")
        self.every_n_steps = every_n_steps
        self.collections = 0
        self.seconds = 0.0
        self._collected = 0
        self._holding = False
        self._enabled = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collect, freeze the remaining objects, and disable automatic collection."""
        # A second fit may begin without the end of the first.
        self._restore()
        self._holding, self._enabled, self._collected = True, gc.isenabled(), trainer.global_step
        # Collected first, so that `freeze` keeps only what is alive.
        self._collect()
        # No collection but ours: ranks would wait for each other's at different moments.
        gc.disable()
        gc.freeze()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collect every ``every_n_steps`` steps."""
        step = trainer.global_step
        if step != self._collected and step % self.every_n_steps == 0:
            self._collected = step
            self._collect()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collect after validation: the ranks have stopped training anyway."""
        if self._holding:
            self._collect()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore Python's own collection."""
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore Python's own collection."""
        self._restore()

    def _collect(self) -> None:
        start = time.perf_counter()
        gc.collect()
        self.collections += 1
        self.seconds += time.perf_counter() - start

    def _restore(self) -> None:
        if self._holding:
            self._holding = False
            # Frozen objects would never be collected again.
            gc.unfreeze()
            if self._enabled:
                gc.enable()
