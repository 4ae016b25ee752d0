"""Parameters that have a place on a device, and no memory yet: storage is laid out before values exist.

Such a parameter has its shape, type and device, so that optimizers can be made over it. All of its elements are one NaN
in memory.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


def without_memory(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape and type on ``device`` in the memory of one element."""
    return unknown(like, device) if like.numel() < 2 else _fill(like, (), device).expand(like.shape)


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has room for all of its elements; a meta tensor has none."""
    return not tensor.is_meta and tensor.untyped_storage().nbytes() >= prod(tensor.shape) * tensor.element_size()


def unknown(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape and type on ``device`` with values that nobody has chosen: NaN, or zero."""
    return _fill(like, like.shape, device)


def _fill(like: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan if like.is_floating_point() else 0, dtype=like.dtype, device=device)
