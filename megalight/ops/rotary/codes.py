"""The rotation after a product in 8 bits: the gradient of the packed projection is codes alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.ops.common import apply, lazy, once_differentiable, serve_all, triton_why_not
from megalight.ops.quantize import Scheme, amax_of, cast, whole_cast_why_not
from megalight.ops.rotary import rotate_qkv
from megalight.ops.unwritten import Told, unwritten
from megalight.registry import Backend, BackendRegistry, remembered


class Spec(NamedTuple):
    """A request.

    Attributes:
        device: device type.
        dtype: dtype of the heads.
        table_dtype: dtype of cosines and sines.
        head_dim: features of a head.
        rotated: features of a head that are rotated.
        interleaved: whether pairs are neighbors.
        rows, columns: schemes of the matrix and of its transpose.
    """

    device: str
    dtype: torch.dtype
    table_dtype: torch.dtype
    head_dim: int
    rotated: int
    interleaved: bool
    rows: Scheme | None
    columns: Scheme | None


CastGradient: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, bool, Scheme | None, Scheme | None, Tensor], Told
]
CAST_QKV_GRADIENT: BackendRegistry[Spec, CastGradient] = BackendRegistry("cast_qkv_gradient")


def cast_qkv_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    rows: Scheme | None,
    columns: Scheme | None,
    amax: Tensor,
    backend: str = "auto",
) -> Told:
    """Cast the gradient ``[T, (H + 2 Hkv) D]`` of a packed projection, from those of its rotated heads.

    Args:
        q, k, v: gradients ``[T, H, D]``, ``[T, Hkv, D]`` and ``[T, Hkv, D]``.
        cos, sin: ``[T, r / 2]``.
        interleaved: as in :func:`~megalight.ops.rotary.apply_rotary`.
        rows, columns: as for :func:`~megalight.ops.quantize.cast`.
        amax: what the scales cover, 0-dim float32.
        backend: name of a backend.

    Returns:
        the casts, and magnitudes of which the largest is that of what was cast.
    """
    spec = Spec(q.device.type, q.dtype, cos.dtype, q.shape[2], 2 * cos.shape[1], interleaved, rows, columns)
    return _choose(spec, backend)(q, k, v, cos, sin, interleaved, rows, columns, amax)


@remembered
def _choose(spec: Spec, backend: str) -> CastGradient:
    return CAST_QKV_GRADIENT.select(spec, backend).fn


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    rows: Scheme | None,
    columns: Scheme | None,
    amax: Tensor,
) -> Told:
    with torch.enable_grad():
        # The rotation is linear, so its gradient does not depend on where it is taken.
        leaf = q.new_empty(len(q), (q.shape[1] + 2 * k.shape[1]) * q.shape[2]).requires_grad_()
        out = rotate_qkv(leaf, q.shape[1], k.shape[1], q.shape[2], cos, sin, interleaved)
        (packed,) = torch.autograd.grad(out, leaf, (q, k, v))
    return cast(packed, rows, columns, amax=amax, amax_t=amax), amax_of(packed)


def _triton_why_not(spec: Spec) -> str | None:
    if spec.interleaved or spec.rotated != spec.head_dim or spec.head_dim not in (32, 64, 128, 256):
        return "serves heads of 32, 64, 128 or 256 features, all rotated, in pairs half a head apart"
    why_not = whole_cast_why_not(spec.dtype, spec.rows, spec.columns)
    return why_not or triton_why_not(spec.device, spec.dtype, spec.table_dtype)


CAST_QKV_GRADIENT.register(
    Backend("triton", lazy("megalight.ops.rotary.codes_triton", "cast_qkv_gradient"), 10, _triton_why_not)
)
CAST_QKV_GRADIENT.register(Backend("reference", _reference, 0, serve_all))


class _Unwritten(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: tuple[int, int, int], cos: Tensor, sin: Tensor, interleaved: bool, backend: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.features = interleaved, qkv.shape[1]
        return rotate_qkv(qkv, *heads, cos, sin, interleaved, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        make = partial(cast_qkv_gradient, q, k, v, cos, sin, ctx.interleaved)
        return unwritten((len(q), ctx.features), q, make), None, None, None, None, None


def rotate_qkv_unwritten(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as :func:`~megalight.ops.rotary.rotate_qkv`, while the gradient of ``qkv`` is not written.

    It is :mod:`~megalight.ops.unwritten`: ``qkv`` must come from a product in 8 bits that knows its scales beforehand.
    """
    heads = num_heads, num_kv_heads, head_dim
    out: tuple[Tensor, Tensor, Tensor] = apply(_Unwritten, qkv, heads, cos, sin, interleaved, backend)
    return out
