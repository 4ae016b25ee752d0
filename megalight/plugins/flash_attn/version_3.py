"""flash-attn 3, for Hopper (https://arxiv.org/abs/2407.08608)."""

from __future__ import annotations

import torch

from megalight.ops.attention import Spec
from megalight.plugins.flash_attn.release import Release
from megalight.plugins.package import Package

MODULE = "flash_attn_interface"
PACKAGE = Package(MODULE, "flash-attn-3", "build the folder hopper/ of https://github.com/Dao-AILab/flash-attention")
ARCHITECTURES = (8, 9)
"""Major compute capabilities that it serves."""
RELEASE = Release(PACKAGE, MODULE)
attention = RELEASE.attention


def why_not(spec: Spec) -> str | None:
    """Return why it cannot serve attention, or None."""
    reason = RELEASE.why_not(spec)
    # Asked last: it needs a GPU, and the other reasons do not.
    if reason is None and (major := torch.cuda.get_device_capability()[0]) not in ARCHITECTURES:
        return f"serves sm_80 to sm_90, not sm_{major}x"
    return reason
