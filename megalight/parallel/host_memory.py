"""Memory of the host for values that a device writes and reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory for values of a device: pinned for a GPU, which then copies without the host's help."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")
