"""Pixels as a tower takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.errors import DataError
from megalight.models.vision.config import VisionConfig


def normalized(pixels: Tensor, config: VisionConfig) -> Tensor:
    """``[P, patch_values]``, uint8 to float32, with the mean and deviation of each color; floating-point as it is.

    Raises:
        DataError: patches have another number of values than those of the tower.
    """
    if pixels.shape[1] != config.patch_values:
        raise DataError(
            f"patches have {pixels.shape[1]} values; the tower takes {config.channels} x {config.patch_size} x "
            f"{config.patch_size} = {config.patch_values}. Cut images into patches of the model's size."
        )
    if pixels.is_floating_point():
        return pixels
    # On the device of the pixels, to which they travel as bytes.
    colors = pixels.view(-1, config.channels, config.patch_size**2).float() / 255
    each = [(colors[:, i] - mean) / std for i, (mean, std) in enumerate(zip(config.mean, config.std, strict=True))]
    return torch.stack(each, 1).flatten(1)
