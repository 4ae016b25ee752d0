"""Logs the learning rate and the norm of the gradient, and the last step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from megalight.strategies.mesh_strategy import MeshStrategy


class OptimizerMonitor(pl.Callback):
    """Logs ``lr`` and ``grad_norm`` every ``log_every_n_steps`` steps, to every logger.

    With clipping by norm, ``MegatronStrategy`` computes and logs ``grad_norm`` in every step. Without clipping it costs
    one pass over the gradients in each step that is logged. It is not logged under strategies that shard gradients in
    their own way, nor with 16-bit precision, whose gradients are scaled.

    Lightning leaves out the last step of a run if its number is no multiple. It is logged when training ends: these
    values, and others whose names begin with ``train_``.

    Nothing waits for the device before that.

    Logs:
        lr: learning rate of the first parameter group.
        grad_norm: norm of the whole gradient before clipping, over all ranks.
    """

    reads_weights = False

    def __init__(self) -> None:
        self._last: tuple[int, float | None] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget the last step of an earlier run."""
        self._last = None

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Log the values of the step that comes, under its number."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        rate = learning_rate(trainer)
        # The step that comes has the next number, under which Lightning logs.
        if not every or (trainer.global_step + 1) % every:
            # A schedule changes the rate after the step.
            self._last = None if not every else (trainer.global_step, None if isinstance(rate, Tensor) else rate)
            return
        self._last = None
        if isinstance(rate, Tensor):  # on the device, for optimizers that are recorded
            pl_module.log("lr", rate.detach().clone(), on_step=True, on_epoch=False, batch_size=1)
        elif rate is not None:  # ``log`` would copy it to the device, and wait
            for logger in trainer.loggers:
                logger.log_metrics({"lr": rate}, step=trainer.global_step)
        norm = gradient_norm(trainer, pl_module)
        if norm is not None:
            pl_module.log("grad_norm", norm, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the last step, unless Lightning has."""
        if self._last is None:
            return
        (step, rate), found = self._last, trainer.callback_metrics
        values = {name: float(value) for name, value in found.items() if name.startswith("train_")}
        if isinstance(trainer.strategy, MeshStrategy) and "grad_norm" in found and trainer.gradient_clip_val:
            values["grad_norm"] = float(found["grad_norm"])  # of every step, while others are of the last logged one
        if rate is not None:
            values["lr"] = rate
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)


def learning_rate(trainer: pl.Trainer) -> float | Tensor | None:
    """Return the learning rate of the first group of the first optimizer."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rate: float | Tensor | None = groups[0].get("lr") if groups else None
    return rate


def gradient_norm(trainer: pl.Trainer, module: pl.LightningModule) -> Tensor | None:
    """Return the norm of the gradient before clipping. None: the strategy logs it, or it is not known here."""
    strategy = trainer.strategy
    if isinstance(strategy, MeshStrategy):
        logged = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
        return None if logged or strategy.engine is None else strategy.engine.grad_norm()
    # Gradients of 16-bit precision are still scaled here.
    known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not str(trainer.precision).startswith("16")
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients) if known and gradients else None
