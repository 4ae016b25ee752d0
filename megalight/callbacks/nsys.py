"""A window of steps for Nsight Systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from megalight.callbacks.windows import StepWindow, check_ranks
from megalight.errors import ConfigurationError


class NsysWindow(pl.Callback):
    """Lets Nsight Systems record a few steps only: ``nsys profile --capture-range=cudaProfilerApi ...``.

    The device is waited for at the window's two edges, so that it holds whole steps, and nowhere else.

    Args:
        start_step: the first optimizer step that is recorded; training begins with step 0.
        stop_step: the first one that is not any more.
        ranks: which ranks record.

    Raises:
        ConfigurationError: an empty window; in ``fit``, no CUDA on one of ``ranks``.
    """

    def __init__(self, start_step: int, stop_step: int, ranks: Sequence[int] = (0,)) -> None:
        self.window = StepWindow(start_step, stop_step)
        self.ranks = check_ranks(ranks)
        self._recording = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that there is something to record."""
        if trainer.global_rank in self.ranks and trainer.strategy.root_device.type != "cuda":
            raise ConfigurationError(
                f"NsysWindow records CUDA devices, and rank {trainer.global_rank} runs on "
                f"{trainer.strategy.root_device.type}; use megalight.callbacks.ProfilerWindow there."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin, before the window's first step."""
        if not self._recording and trainer.global_rank in self.ranks and self.window.begins(trainer.global_step):
            torch.cuda.synchronize()
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            self._recording = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End, after its last."""
        if trainer.global_step >= self.window.stop:
            self._stop()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End with training."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep what was recorded; a device that failed is not waited for."""
        self._stop(wait=False)

    def _stop(self, wait: bool = True) -> None:
        if self._recording:
            self._recording = False
            if wait:
                torch.cuda.synchronize()
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
