"""The part of a model with a vision tower that a rank holds."""

from __future__ import annotations

from torch import nn

from megalight.errors import ConfigurationError
from megalight.models.vlm.model import VLM, TowerPart
from megalight.parallel.transform import share_transforms


def part_of(whole: nn.Module, tower: bool) -> nn.Module:
    """Return the tower and the projector of a model, or everything else; see :func:`divided`."""
    part, language = divided(whole)
    return part if tower else language


def divided(whole: nn.Module) -> tuple[TowerPart, VLM]:
    """Return the tower and the projector of a model, and the model without them. A model is divided once.

    Transforms have changed the whole before: patterns of adapters may match layers of one part alone.

    Raises:
        ConfigurationError: the model has no vision tower.
    """
    if not isinstance(whole, VLM):
        raise ConfigurationError(
            f"a tower in a layout of its own needs a model with a vision tower, and {type(whole).__name__} has none; "
            "train a VLMModule, or use MegatronStrategy."
        )
    part = whole.without_tower()
    share_transforms(whole, part)
    return part, whole
