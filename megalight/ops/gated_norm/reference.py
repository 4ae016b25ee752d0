"""The gated norm in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import wide


def gated_norm(
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    group_size: int,
    eps: float,
    average: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """See :func:`megalight.ops.gated_norm.gated_norm`."""
    # Squares and their mean lose digits in half precision, and the gate multiplies before the norm.
    dtype = wide(y.dtype)
    gated = y.to(dtype) * F.silu(z.to(dtype))
    groups = gated.view(*gated.shape[:-1], -1, group_size)
    mean = groups.square().mean(-1, keepdim=True)
    normed = groups * torch.rsqrt((mean if average is None else average(mean)) + eps)
    # The weight in the wide dtype, too: the result is rounded once.
    out: Tensor = (normed.flatten(-2) * weight.to(dtype)).to(y.dtype)
    return out
