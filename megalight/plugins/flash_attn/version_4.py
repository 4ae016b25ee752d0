"""flash-attn 4, for Hopper and Blackwell. It is written in CuTe and compiled at its first use."""

from __future__ import annotations

import torch

from megalight.ops.attention import Spec
from megalight.plugins.flash_attn.release import Release
from megalight.plugins.package import Package

MODULE = "flash_attn.cute"
PACKAGE = Package(MODULE, "flash-attn-4", "pip install --pre flash-attn-4")
RELEASE = Release(PACKAGE, MODULE, unlimited=None, sink="learnable_sink")
attention = RELEASE.attention


def why_not(spec: Spec) -> str | None:
    """Return why it cannot serve attention, or None."""
    return RELEASE.why_not(spec) or too_wide(spec.head_dim)


def too_wide(head_dim: int) -> str | None:
    """Return why heads are too wide for this GPU, or None."""
    if head_dim > 128 and torch.cuda.get_device_capability()[0] > 9:
        return f"serves heads up to 128 on this device, not {head_dim}"
    return None
