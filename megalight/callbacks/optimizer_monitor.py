"""Logs the learning rate and the norm of the gradient."""

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

    Nothing waits for the device.

    Logs:
        lr: learning rate of the first parameter group.
        grad_norm: norm of the whole gradient before clipping, over all ranks.
    """

    reads_weights = False

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Log the values of the step that comes, under its number."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        # The step that comes has the next number, under which Lightning logs.
        if not every or (trainer.global_step + 1) % every:
            return
        rate = learning_rate(trainer)
        if isinstance(rate, Tensor):  # on the device, for optimizers that are recorded
            pl_module.log("lr", rate.detach().clone(), on_step=True, on_epoch=False, batch_size=1)
        elif rate is not None:  # ``log`` would copy it to the device, and wait
            for logger in trainer.loggers:
                logger.log_metrics({"lr": rate}, step=trainer.global_step)
        norm = gradient_norm(trainer, pl_module)
        if norm is not None:
            pl_module.log("grad_norm", norm, on_step=True, on_epoch=False, batch_size=1)


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
