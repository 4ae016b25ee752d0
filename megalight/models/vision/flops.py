"""Floating-point operations of a vision transformer, computed from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalight.models.vision.config import VisionConfig
from megalight.nn.mlp import is_gated


@dataclass(frozen=True)
class Passes:
    """What is computed of a part of a model.

    Attributes:
        weights: the share of its weights whose gradients are.
        inputs: whether gradients of inputs are, for what is before.
    """

    weights: float = 1.0
    inputs: bool = True

    @property
    def of_weights(self) -> float:
        """Operations for each weight and row: two forward, two for each gradient."""
        return 2.0 + 2.0 * self.weights + 2.0 * self.inputs

    @property
    def of_attention(self) -> float:
        """Those of the products of attention, as a multiple of the forward pass. They have no weights."""
        return 3.0 if self.inputs else 1.0


def flops_of_images(
    config: VisionConfig, lengths: Sequence[int], windows: Sequence[int] = (), passes: Passes | None = None
) -> float:
    """Return operations of forward and backward for images.

    In training, each weight counts six operations for each row: a patch or a class token. Attention counts twelve for
    each query feature and each row that it sees.

    Args:
        config: the tower.
        lengths: rows of each image.
        windows: rows of each window, for a tower with windows.
        passes: what is computed of its layers. None: all gradients.
    """
    passes = passes or Passes()
    h, dynamic, frames = config.hidden_size, config.dynamic, 1
    windowed = 0
    if dynamic is not None:
        windowed, frames = sum(map(dynamic.has_window, range(config.num_layers))), dynamic.frames
    layer = h * (4 * h + (3 if is_gated(config.activation) else 2) * config.ffn_hidden_size)
    matmul = config.num_layers * layer + frames * config.patch_values * h
    seen = (config.num_layers - windowed) * sum(rows**2 for rows in lengths) + windowed * sum(r**2 for r in windows)
    return passes.of_weights * matmul * sum(lengths) + 4.0 * passes.of_attention * h * seen
