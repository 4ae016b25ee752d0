"""Whether the current work is being recorded."""

from __future__ import annotations

import torch


def capturing() -> bool:
    """Whether a CUDA graph is capturing the current stream; the host must then not wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
