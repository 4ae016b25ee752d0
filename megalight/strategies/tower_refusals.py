"""What a vision tower in a layout of its own does not go with."""

from __future__ import annotations

import lightning.pytorch as pl

from megalight.errors import ConfigurationError
from megalight.models.transforms import DoRA, LoRA
from megalight.models.vlm.module import VLMModule
from megalight.strategies.checkpoints.options import Checkpoints
from megalight.strategies.mesh_strategy import MeshStrategy
from megalight.strategies.micro_batches import AUTO
from megalight.strategies.user_module import STEPS, own_steps

ADAPTERS = LoRA, DoRA
"""Transforms that change each layer by itself, wherever it is."""


def check_options(strategy: MeshStrategy, what: str) -> None:
    """Refuse options of a strategy.

    Args:
        what: how the tower is placed, for the messages.

    Raises:
        ConfigurationError: it cannot be combined with such a tower.
    """
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


def check_module(module: pl.LightningModule, what: str) -> None:
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
    if module.frozen_models():
        raise ConfigurationError(
            f"{type(module).__name__} has frozen_models, which read whole micro-batches beside the trained model; "
            f"{what} has none beside it. Use MegatronStrategy."
        )
    if strange := [each for each in module.transforms if not isinstance(each, ADAPTERS)]:
        raise ConfigurationError(
            f"the transform {type(strange[0]).__name__} with {what} is not supported, only adapters are; use "
            "MegatronStrategy."
        )
