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
    last: bool = False,
    average: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """See :func:`megalight.ops.gated_norm.gated_norm`."""
    # Squares and their mean lose digits in half precision, and so do products with the gate.
    dtype = wide(y.dtype)
    value, gate = y.to(dtype), F.silu(z.to(dtype))
    groups = (value if last else value * gate).view(*y.shape[:-1], -1, group_size)
    mean = groups.square().mean(-1, keepdim=True)
    normed = groups * torch.rsqrt((mean if average is None else average(mean)) + eps)
    # The weight in the wide dtype, too: the result is rounded once.
    scaled = (normed * weight.to(dtype).view(-1, group_size)).flatten(-2)
    out: Tensor = (scaled * gate if last else scaled).to(y.dtype)
    return out
