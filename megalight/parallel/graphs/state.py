"""Whether what runs now is being recorded."""

from __future__ import annotations

import torch


def capturing() -> bool:
    """Whether a CUDA graph records the current stream: nothing may then be asked of the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
