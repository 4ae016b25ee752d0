"""Rotary position embedding (RoPE): the rotation of heads or of a packed projection, and its backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import lazy, select, serve_all, triton_why_not, wide
from megalight.ops.rotary.frequencies import RotaryAxes as RotaryAxes
from megalight.ops.rotary.frequencies import RotaryScaling as RotaryScaling
from megalight.ops.rotary.frequencies import rotary_table as rotary_table
from megalight.registry import Backend, BackendRegistry, remembered


def reference_apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
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


def reference_rotate_qkv(
    qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection and rotate its queries and keys."""
    heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
    return reference_apply_rotary(q, cos, sin, interleaved), reference_apply_rotary(k, cos, sin, interleaved), v


class RotarySpec(NamedTuple):
    """A request to a rotation: device type, dtype of the heads, dtype of the table."""

    device: str
    dtype: torch.dtype
    table_dtype: torch.dtype


APPLY_ROTARY: BackendRegistry[RotarySpec, Callable[..., Tensor]] = BackendRegistry("apply_rotary")
ROTATE_QKV: BackendRegistry[RotarySpec, Callable[..., tuple[Tensor, Tensor, Tensor]]] = BackendRegistry("rotate_qkv")
REGISTRIES: tuple[BackendRegistry[RotarySpec, Any], ...] = (APPLY_ROTARY, ROTATE_QKV)
EXAMPLE = RotarySpec("cpu", torch.bfloat16, torch.float32)


def _triton_why_not(spec: RotarySpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype, spec.table_dtype)


_TRITON = "megalight.ops.rotary.triton"
APPLY_ROTARY.register(Backend("triton", lazy(_TRITON, "apply_rotary"), 20, _triton_why_not))
APPLY_ROTARY.register(Backend("reference", reference_apply_rotary, 0, serve_all))
# Measuring saves a pass: the cast to 8 bits needs the largest magnitude of the gradient.
ROTATE_QKV.register(Backend("triton", lazy(_TRITON, "rotate_qkv", measures=True), 20, _triton_why_not))
ROTATE_QKV.register(Backend("reference", reference_rotate_qkv, 0, serve_all))


@remembered
def _choose(
    registry: BackendRegistry[RotarySpec, Callable[..., Any]], spec: RotarySpec, backend: str
) -> Callable[..., Any]:
    return select(registry, spec, backend)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, backend: str = "auto") -> Tensor:
    """Rotate the first ``r = 2 * cos.shape[-1]`` features of every head.

    Args:
        x: ``[T, H, D]``.
        cos: ``[T, r/2]``, from :func:`rotary_table`.
        sin: ``[T, r/2]``.
        interleaved: whether pairs are neighbors ``(2i, 2i+1)`` (GPT-J) instead of ``(i, i + r/2)`` (Llama, NeoX).
        backend: name of a backend.
    """
    out: Tensor = _choose(APPLY_ROTARY, RotarySpec(x.device.type, x.dtype, cos.dtype), backend)(
        x, cos, sin, interleaved
    )
    return out


def rotate_qkv(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection and rotate its queries and keys in one pass.

    Args:
        qkv: ``[T, (Hq + 2 Hkv) * D]``: all query heads, then key heads, then value heads.
        num_heads: ``Hq``.
        num_kv_heads: ``Hkv``.
        head_dim: ``D``.
        cos: ``[T, r/2]``.
        sin: ``[T, r/2]``.
        interleaved: as in :func:`apply_rotary`.
        backend: name of a backend. A :func:`~megalight.ops.common.measuring` one also finds the largest magnitude of
            the gradient of ``qkv``.

    Returns:
        ``q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]``.
    """
    fn = _choose(ROTATE_QKV, RotarySpec(qkv.device.type, qkv.dtype, cos.dtype), backend)
    out: tuple[Tensor, Tensor, Tensor] = fn(qkv, num_heads, num_kv_heads, head_dim, cos, sin, interleaved)
    return out
