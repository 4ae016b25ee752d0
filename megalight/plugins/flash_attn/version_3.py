"""flash-attn 3, for Hopper (https://arxiv.org/abs/2407.08608)."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.attention import Spec
from megalight.plugins.flash_attn import call
from megalight.plugins.package import Package
from megalight.types import PackedSequences

MODULE = "flash_attn_interface"
PACKAGE = Package(MODULE, "flash-attn-3", "build the folder hopper/ of https://github.com/Dao-AILab/flash-attention")
ARCHITECTURES = (8, 9)
"""Major compute capabilities that it was written for."""


def why_not(spec: Spec) -> str | None:
    """Why attention cannot be served."""
    if spec.dropout:
        return "has no dropout"
    reason = call.why_not(PACKAGE, MODULE, spec)
    if reason is None and (major := torch.cuda.get_device_capability()[0]) not in ARCHITECTURES:
        return f"serves sm_80 to sm_90, not sm_{major}x"
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
    """Everything that the op can ask for but dropout."""
    options = {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (-1 if window is None else window, 0 if causal else -1),
        "softcap": softcap or 0.0,
    }
    return call.call(PACKAGE, MODULE, q, k, v, sequences, options)
