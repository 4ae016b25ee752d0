"""Norms with torch's own fused functions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megalight.ops.norm.reference import of_sum


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim; ``weight`` has the dtype of ``x``."""
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dim; ``weight`` has the dtype of ``x``."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


add_rms_norm = of_sum(rms_norm)
add_layer_norm = of_sum(layer_norm)
