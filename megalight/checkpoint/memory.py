"""Tensors as bytes in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.checkpoint.disk.checksum import BLOCK
from megalight.checkpoint.disk.files import CODES
from megalight.errors import CheckpointError


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a dtype.

    Raises:
        CheckpointError: safetensors has no code for it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in CODES:
        raise CheckpointError(f"tensors of {dtype} cannot be saved; safetensors knows {', '.join(CODES)}. Convert it.")
    return name


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as flat ``uint8``."""
    # Any dtype is written as bytes; safetensors' header says which one it was.
    return tensor.detach().reshape(-1).view(torch.uint8)


def host_memory(nbytes: int) -> Tensor:
    """Host memory as ``uint8``; page-locked where there is a GPU, for fast copies."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def host_buffer() -> Tensor:
    """Host memory for one block."""
    return host_memory(BLOCK)
