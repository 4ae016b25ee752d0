"""The heads in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.rotary.reference import apply_rotary


def rotate_tail(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """See :func:`megalight.ops.latent_heads.rotate_tail`."""
    width = 2 * cos.shape[-1]
    plain, turned = torch.split(x, [x.shape[-1] - width, width], -1)
    return torch.cat([plain, apply_rotary(turned, cos, sin, interleaved)], -1)


def join_keys(wide: Tensor, key: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """See :func:`megalight.ops.latent_heads.join_keys`."""
    k, v = torch.split(wide, [head_dim, wide.shape[-1] - head_dim], -1)
    # `expand` copies nothing. The concatenation is what writes the same features into every head.
    return torch.cat([k, key[:, None].expand(-1, k.shape[1], -1)], -1), v
