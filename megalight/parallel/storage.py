"""Parameters with a device, but no memory yet, so that storage can be laid out before values exist.

Such a parameter has its shape, dtype and device, so that optimizers can be created for it. All its elements are one NaN
in memory.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


def without_memory(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and dtype on ``device`` that uses the memory of one element."""
    # Strides of 0: one element serves the whole shape. A single element has its memory anyway.
    return unknown(like, device) if like.numel() < 2 else _fill(like, (), device).expand(like.shape)


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has memory for all its elements; a meta tensor has none."""
    return not tensor.is_meta and tensor.untyped_storage().nbytes() >= prod(tensor.shape) * tensor.element_size()


def unknown(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and dtype on ``device`` without chosen values: NaN, or zero for integers."""
    return _fill(like, like.shape, device)


def _fill(like: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan if like.is_floating_point() else 0, dtype=like.dtype, device=device)
