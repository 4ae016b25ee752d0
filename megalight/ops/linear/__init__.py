"""``y = x W^T + b``, with the weight gradient accumulated where the parameter says."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., in] x [out, in] -> [..., out]``."""
    return F.linear(x, weight, bias)
