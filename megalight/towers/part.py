"""The part of a model with a vision tower that a rank holds."""

from __future__ import annotations

from torch import nn

from megalight.errors import ConfigurationError
from megalight.models.vlm.model import VLM


def part_of(whole: nn.Module, tower: bool) -> nn.Module:
    """Return the tower and the projector of a model, or everything else. The model is changed.

    Raises:
        ConfigurationError: the model has no vision tower, or nothing is trained on the tower's ranks.
    """
    if not isinstance(whole, VLM):
        raise ConfigurationError(
            f"a tower on ranks of its own needs a model with a vision tower, and {type(whole).__name__} has none; "
            "train a VLMModule, or use MegatronStrategy."
        )
    part = whole.without_tower()
    if not any(parameter.requires_grad for parameter in part.parameters()):
        raise ConfigurationError(
            "all parameters of the tower and the projector are frozen, so nothing is left to train on the ranks of the "
            "tower; train the projector, or let both models have the same ranks."
        )
    return part if tower else whole
