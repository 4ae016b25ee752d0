"""Floating-point operations of a vision transformer, computed from its configuration."""

from __future__ import annotations

from megalight.models.vision.config import VisionConfig


def flops_per_row(config: VisionConfig) -> float:
    """Return operations of forward and backward for a row of an image: a patch or a class token.

    Each weight counts six operations. Attention counts twelve for each query feature and row of the image.
    """
    h = config.hidden_size
    layer = h * (4 * h + 2 * config.ffn_hidden_size)
    matmul = config.num_layers * layer + config.patch_values * h
    return 6.0 * matmul + 12.0 * config.num_layers * h * config.num_rows
