"""The convolution of ``causal-conv1d``."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.causal_conv import Spec
from megalight.ops.common import HALF
from megalight.plugins.mamba_ssm.sequences import numbers
from megalight.plugins.package import Package

PACKAGE = Package("causal_conv1d", "causal-conv1d", "pip install --no-build-isolation causal-conv1d")
MINIMUM = "1.2"
"""The first version with packed sequences."""
CONV = "causal_conv1d:causal_conv1d_fn"
TAPS = (2, 3, 4)
STEP = 8
"""Channels that a thread reads at once. Numbers of channels and strides must be multiples of it."""


def why_not(spec: Spec) -> str | None:
    """Return why it cannot serve, or None."""
    if spec.dtype not in (*HALF, torch.float32):
        return f"serves bfloat16, float16 and float32, not {spec.dtype}"
    if spec.taps not in TAPS:
        return f"serves {TAPS[0]} to {TAPS[-1]} taps, not {spec.taps}"
    if spec.channels % STEP:
        return f"needs a multiple of {STEP} channels, not {spec.channels}"
    return PACKAGE.why_not(spec.device, "causal_conv", CONV, minimum=MINIMUM)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    """See :func:`megalight.ops.causal_conv.causal_conv`."""
    # Packed sequences need channels side by side: `[1, channels, T]` with a stride of 1 for the channels.
    rows = x if x.stride(1) == 1 and x.stride(0) % STEP == 0 else x.contiguous()
    options = {"seq_idx": numbers(positions), "activation": "silu" if silu else None}
    out: Tensor = PACKAGE.load(CONV)(rows.t()[None], weight, bias, **options)
    return out[0].t()
