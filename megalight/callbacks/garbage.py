"""Python's garbage collection at the same steps on every rank."""

from __future__ import annotations

import gc
import time
from typing import Any

import lightning.pytorch as pl

from megalight.errors import ConfigurationError


class GarbageCollection(pl.Callback):
    """Switches automatic garbage collection off while training runs, and collects every few optimizer steps.

    Left alone, each rank collects at a moment of its own, for as long as it has objects, and all the others wait for
    it. Here all collect together. What is alive when training starts is never looked through again (``gc.freeze``), so
    a collection is short. Afterwards, also after an error, everything is as it was.

    Args:
        every_n_steps: optimizer steps between collections.

    Attributes:
        collections: how many there were.
        seconds: spent in them.

    Raises:
        ConfigurationError: a number of steps below 1.
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
        """Collect, set aside what is left, and take over."""
        self._restore()
        self._holding, self._enabled, self._collected = True, gc.isenabled(), trainer.global_step
        self._collect()
        gc.disable()
        gc.freeze()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collect, at steps that are the same on every rank."""
        step = trainer.global_step
        if step != self._collected and step % self.every_n_steps == 0:
            self._collected = step
            self._collect()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collect what validation left; training has paused anyway."""
        if self._holding:
            self._collect()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give it back to Python."""
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give it back to Python."""
        self._restore()

    def _collect(self) -> None:
        start = time.perf_counter()
        gc.collect()
        self.collections += 1
        self.seconds += time.perf_counter() - start

    def _restore(self) -> None:
        if self._holding:
            self._holding = False
            gc.unfreeze()
            if self._enabled:
                gc.enable()
