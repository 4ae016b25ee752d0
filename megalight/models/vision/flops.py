"""Floating-point operations of a vision transformer, computed from its configuration."""

from __future__ import annotations

from collections.abc import Sequence

from megalight.models.vision.config import VisionConfig
from megalight.nn.mlp import is_gated


def flops_of_images(config: VisionConfig, lengths: Sequence[int], windows: Sequence[int] = ()) -> float:
    """Return operations of forward and backward for images.

    Each weight counts six operations for each row: a patch or a class token. Attention counts twelve for each query
    feature and each row that it sees.

    Args:
        config: the tower.
        lengths: rows of each image.
        windows: rows of each window, for a tower with windows.
    """
    h, dynamic, frames = config.hidden_size, config.dynamic, 1
    windowed = 0
    if dynamic is not None:
        windowed, frames = sum(map(dynamic.has_window, range(config.num_layers))), dynamic.frames
    layer = h * (4 * h + (3 if is_gated(config.activation) else 2) * config.ffn_hidden_size)
    matmul = config.num_layers * layer + frames * config.patch_values * h
    seen = (config.num_layers - windowed) * sum(rows**2 for rows in lengths) + windowed * sum(r**2 for r in windows)
    return 6.0 * matmul * sum(lengths) + 12.0 * h * seen
