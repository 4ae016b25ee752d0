"""A window of steps for Nsight Systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from megalight.callbacks.profiling.windows import StepWindow, check_ranks
from megalight.errors import ConfigurationError


class NsysWindow(pl.Callback):
    """Makes Nsight Systems record only a few steps: ``nsys profile --capture-range=cudaProfilerApi ...``.

    The host waits for the device at both ends of the window, so that it holds whole steps.

    Args:
        start_step: the first recorded optimizer step. Training begins with step 0.
        stop_step: the first optimizer step after the window.
        ranks: the ranks that record.

    Raises:
        ConfigurationError: the window is empty, or one of ``ranks`` is not on CUDA (in ``fit``).
    """

    def __init__(self, start_step: int, stop_step: int, ranks: Sequence[int] = (0,)) -> None:
        self.window = StepWindow(start_step, stop_step)
        self.ranks = check_ranks(ranks)
        self._recording = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that this rank is on CUDA."""
        if trainer.global_rank in self.ranks and trainer.strategy.root_device.type != "cuda":
            raise ConfigurationError(
                f"NsysWindow needs a CUDA device, but rank {trainer.global_rank} runs on "
                f"{trainer.strategy.root_device.type}; use megalight.callbacks.ProfilerWindow instead."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start recording before the first step of the window."""
        if not self._recording and trainer.global_rank in self.ranks and self.window.begins(trainer.global_step):
            # The device first finishes what was queued before the window.
            torch.cuda.synchronize()
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            self._recording = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop recording after the last step of the window."""
        if trainer.global_step >= self.window.stop:
            self._stop()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop recording."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop recording without waiting for the device, which may have failed."""
        self._stop(wait=False)

    def _stop(self, wait: bool = True) -> None:
        if self._recording:
            self._recording = False
            # After a failure of the device, waiting would hang or raise again.
            if wait:
                torch.cuda.synchronize()
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
