"""Rotary embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.common import wide


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` features of ``x [T, H, D]``. Half types are computed in float32."""
    half = cos.shape[-1]
    dtype = wide(x.dtype)
    rotated, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    # The two members of each pair: neighbors, or features half the rotated width apart.
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else torch.split(rotated, half, -1)
    # `[T, 1, r/2]`: all heads of a token turn by the same angles.
    cos, sin = cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def rotate_qkv(
    qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection and rotate its queries and keys."""
    heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
    return apply_rotary(q, cos, sin, interleaved), apply_rotary(k, cos, sin, interleaved), v
