"""flash-attn 4, written in CuTe for Hopper and Blackwell, compiled at its first use."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.attention import Spec
from megalight.plugins.flash_attn import call
from megalight.plugins.package import Package
from megalight.types import PackedSequences

MODULE = "flash_attn.cute"
PACKAGE = Package(MODULE, "flash-attn-4", "pip install --pre flash-attn-4")


def why_not(spec: Spec) -> str | None:
    """Why attention cannot be served."""
    if spec.dropout:
        return "has no dropout"
    reason = call.why_not(PACKAGE, MODULE, spec)
    if reason is None and spec.head_dim > 128 and torch.cuda.get_device_capability()[0] > 9:
        return f"serves heads up to 128 on this device, not {spec.head_dim}"
    return reason


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Everything that the op can ask for but dropout. What is unlimited is None here, not -1."""
    options = {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (window, 0 if causal else None),
        "softcap": softcap or 0.0,
    }
    return call.call(PACKAGE, MODULE, q, k, v, sequences, options)
