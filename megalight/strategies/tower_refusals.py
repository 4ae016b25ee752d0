"""What a vision tower in a layout of its own does not go with."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from megalight.errors import ConfigurationError, LayoutError
from megalight.models.vlm.module import VLMModule
from megalight.plugins.precision import MegatronLowPrecision
from megalight.strategies import _lightning
from megalight.strategies.checkpoints.options import Checkpoints
from megalight.strategies.mesh_strategy import MeshStrategy
from megalight.strategies.micro_batches import AUTO
from megalight.strategies.user_module import STEPS, own_steps


def check_options(strategy: MeshStrategy, what: str) -> None:
    """Refuse options of a strategy.

    Args:
        what: how the tower is placed, for the messages.

    Raises:
        LayoutError: experts are on several ranks.
        ConfigurationError: another option.
    """
    if strategy.expert_parallel * strategy.expert_tensor_parallel > 1:
        raise LayoutError(
            f"expert_parallel={strategy.expert_parallel}, expert_tensor_parallel={strategy.expert_tensor_parallel} "
            f"with {what}: experts exchange tokens between replicas, which read images in other groups. Set both to 1, "
            "or use MegatronStrategy."
        )
    if strategy.data_parallel.has_units:
        raise ConfigurationError(
            f"data_parallel.level={strategy.data_parallel.level!r} with {what}: only whole parameters and gradients "
            "are supported there. Use level='optim', or MegatronFSDPStrategy."
        )
    if strategy.micro_batch_size == AUTO:
        raise ConfigurationError(
            f"micro_batch_size='auto' with {what}: both models must run the same micro-batches, and each rank measures "
            "its own memory. Give a number."
        )
    if strategy.checkpoints.format != Checkpoints().format:
        raise ConfigurationError(
            f"checkpoints.format={strategy.checkpoints.format!r} with {what}: its names are those of one layout, and "
            f"there are two. Use {Checkpoints().format!r}."
        )


def check_module(strategy: MeshStrategy, module: pl.LightningModule, what: str) -> None:
    """Refuse modules that cannot be divided.

    Raises:
        ConfigurationError: says what to do.
    """
    if not isinstance(module, VLMModule):
        raise ConfigurationError(
            f"{what} needs a VLMModule, and {type(module).__name__} is none; use MegatronStrategy."
        )
    if own := [step for step in STEPS if own_steps(module, step)]:
        raise ConfigurationError(
            f"{type(module).__name__} defines {own[0]}, which no rank can run whole with {what}. Remove it: return "
            "further values as metrics from loss_step."
        )
    if module.transforms or module.frozen_models():
        kind = "transforms (adapters)" if module.transforms else "frozen_models"
        raise ConfigurationError(f"{kind} with {what} are not supported; use MegatronStrategy.")
    if isinstance(strategy.precision, MegatronLowPrecision):
        raise ConfigurationError(f"products in 8 bits with {what} are not supported; use bf16-mixed.")


def check_verb(module: pl.LightningModule, what: str) -> None:
    """Refuse to predict.

    Raises:
        ConfigurationError: the trainer predicts.
    """
    trainer = _lightning.trainer_of(module)
    if trainer is not None and trainer.state.fn == TrainerFn.PREDICTING:
        raise ConfigurationError(
            f"predict with {what} is not supported; checkpoints are the same, so MegatronStrategy can predict from one."
        )
