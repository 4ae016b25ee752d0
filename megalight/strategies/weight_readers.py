"""Find code of users that may read weights where these are not whole: parameters are gathered before it runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning

from megalight.strategies.hooks import defines

log = logging.getLogger(__name__)

HOOKS_BETWEEN_STEPS = (
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_validation_batch_start",
    "on_validation_epoch_start",
    "on_validation_start",
)
"""Hooks of callbacks and modules that run while parameters may still be gathered."""
METHODS_BETWEEN_STEPS = (
    *HOOKS_BETWEEN_STEPS,
    "lr_scheduler_step",
    "on_after_batch_transfer",
    "on_before_batch_transfer",
    "on_validation_model_eval",
    "on_validation_model_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
"""The same hooks for modules, and methods that only modules have."""


HOOKS_OF_SHARDED_WEIGHTS = (
    "on_sanity_check_end",
    "on_sanity_check_start",
    "on_train_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_validation_epoch_end",
)
"""Further hooks in which all weights are there unless each rank keeps only a shard of them."""
HOOKS_BEFORE_UPDATE = ("configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step")
"""Hooks between the backward passes and the update. Sharded weights are not whole there, either."""


def reads_weights_between_steps(module: pl.LightningModule, trainer: pl.Trainer, sharded: bool = False) -> bool:
    """Return whether the user's code runs between steps and may read weights. If so, each step ends with the gather.

    Set ``reads_weights = False`` on a callback or module that reads no weights there.

    Args:
        sharded: between steps, each rank keeps only a shard of the weights.
    """
    if any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return True
    more = (*HOOKS_OF_SHARDED_WEIGHTS, *HOOKS_BEFORE_UPDATE) if sharded else ()
    return _any_defines(module, trainer, (*HOOKS_BETWEEN_STEPS, *more), (*METHODS_BETWEEN_STEPS, *more))


def reads_weights_before_update(module: pl.LightningModule, trainer: pl.Trainer) -> bool:
    """Return whether the user's code runs between backward passes and update, and may read weights."""
    return _any_defines(module, trainer, HOOKS_BEFORE_UPDATE, HOOKS_BEFORE_UPDATE)


def _any_defines(
    module: pl.LightningModule, trainer: pl.Trainer, of_callbacks: Sequence[str], of_module: Sequence[str]
) -> bool:
    owners = [(callback, of_callbacks) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    for owner, names in (*owners, (module, of_module)):
        for name in names if getattr(owner, "reads_weights", True) else ():
            if hasattr(owner, name) and defines(owner, name):
                log.info("%s defines %s: parameters are gathered before it runs", type(owner).__name__, name)
                return True
    return False
