"""Floating-point operations of what a vision-language model does with images."""

from __future__ import annotations

from collections.abc import Sequence

from megalight.models.vision import flops as tower
from megalight.models.vlm.config import VLMConfig


def flops_of_images(config: VLMConfig, lengths: Sequence[int], windows: Sequence[int] = ()) -> float:
    """Return operations of forward and backward of the tower and the projector; those of their tokens are not counted.

    Args:
        config: the model.
        lengths: rows of each image.
        windows: rows of each window, for a tower with windows.
    """
    own, wide = config.projector, config.language.hidden_size
    joined, inner = own.merge**2, own.hidden_size or wide
    weights = joined * config.vision.hidden_size * inner + inner * wide
    return tower.flops_of_images(config.vision, lengths, windows) + 6.0 * weights * (sum(lengths) / joined)
