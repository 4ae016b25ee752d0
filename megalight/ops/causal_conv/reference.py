"""The convolution in plain torch: one shifted copy of the input per tap."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import wide


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    """See :func:`megalight.ops.causal_conv.causal_conv`."""
    # columns as a list, the token's own first
    taps = weight.to(wide(x.dtype)).flip(1).unbind(1)
    places = positions[:, None]
    y = taps[0] * x
    for shift, tap in enumerate(taps[1:], 1):
        # shift the packed tokens as one sequence, then clear places that crossed the start of their own sequence
        y = y + tap * F.pad(x, (0, 0, shift, 0))[: len(x)].masked_fill(places < shift, 0)
    y = y if bias is None else y + bias.to(y.dtype)
    return (F.silu(y) if silu else y).to(x.dtype)
