"""``mamba-ssm`` and ``causal-conv1d``: the scan of Mamba-2, and its causal convolution.

This module imports nothing of the packages; a backend does when its name is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.causal_conv import CAUSAL_CONV, CausalConvSpec
from megalight.ops.common import HALF
from megalight.ops.ssd import SSD, SSDSpec
from megalight.plugins.package import Package
from megalight.registry import Backend


def numbers(positions: Tensor) -> Tensor:
    """From positions in sequences ``[T]`` to the number of each token's sequence, ``[1, T]`` in int32, from 0 on."""
    begins = positions == 0
    # The first token may lie further inside of its sequence. These packages take -1 for padding.
    begins[:1] = True
    return (begins.cumsum(0) - 1).int()[None]


# Causal convolution


CONV_PACKAGE = Package("causal_conv1d", "causal-conv1d", "pip install --no-build-isolation causal-conv1d")
CONV_MINIMUM = "1.2"
"""The first version with packed sequences."""
CONV = "causal_conv1d:causal_conv1d_fn"
TAPS = (2, 3, 4)
STEP = 8
"""Channels that a thread reads at once. Numbers of channels and strides must be multiples of it."""


def conv_why_not(spec: CausalConvSpec) -> str | None:
    """Return why it cannot serve, or None."""
    if spec.dtype not in (*HALF, torch.float32):
        return f"serves bfloat16, float16 and float32, not {spec.dtype}"
    if spec.taps not in TAPS:
        return f"serves {TAPS[0]} to {TAPS[-1]} taps, not {spec.taps}"
    if spec.channels % STEP:
        return f"needs a multiple of {STEP} channels, not {spec.channels}"
    return CONV_PACKAGE.why_not(spec.device, "causal_conv", CONV, minimum=CONV_MINIMUM)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    """See :func:`megalight.ops.causal_conv.causal_conv`."""
    # Packed sequences need channels side by side: `[1, channels, T]` with a stride of 1 for the channels.
    rows = x if x.stride(1) == 1 and x.stride(0) % STEP == 0 else x.contiguous()
    options = {"seq_idx": numbers(positions), "activation": "silu" if silu else None}
    out: Tensor = CONV_PACKAGE.load(CONV)(rows.t()[None], weight, bias, **options)
    return out[0].t()


# Scan


SCAN_PACKAGE = Package("mamba_ssm", "mamba-ssm", "pip install --no-build-isolation mamba-ssm")
SCAN_MINIMUM = "2.0"
"""The first version with Mamba-2."""
SCAN = "mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined"
CHUNK = 256
WIDEST = 256


def scan_why_not(spec: SSDSpec) -> str | None:
    """Return why it cannot serve, or None."""
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    if spec.head_dim % 8 or spec.state_size > WIDEST:
        return (
            f"serves heads of a multiple of 8 features with states of at most {WIDEST}, not {spec.head_dim} and "
            f"{spec.state_size}"
        )
    return SCAN_PACKAGE.why_not(spec.device, "ssd", SCAN, minimum=SCAN_MINIMUM)


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    positions: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """See :func:`megalight.ops.ssd.ssd`."""
    options = {"chunk_size": CHUNK, "D": d, "seq_idx": numbers(positions)}
    if bias is not None:
        options |= {"dt_bias": bias, "dt_softplus": True}
    out: Tensor = SCAN_PACKAGE.load(SCAN)(x[None], dt[None], a, b[None], c[None], **options)
    return out[0]


PRIORITY = 0
"""Unused: backends of plugins are chosen only by name."""


def register() -> None:
    """Add the backends."""
    SSD.register(Backend("mamba_ssm", ssd, PRIORITY, scan_why_not))
    CAUSAL_CONV.register(Backend("causal_conv1d", causal_conv, PRIORITY, conv_why_not))
