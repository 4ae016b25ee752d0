"""RoPE before an FP8 GEMM: the gradient of the packed projection is written quantized only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.ops.autograd import QuantizedCasts, apply, elided_output, once_differentiable
from megalight.ops.common import last_contiguous, serve_all, triton_why_not
from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.quantize import Scheme, amax_of, cast, whole_cast_why_not
from megalight.ops.quantize.triton import (
    empty_quantized,
    quantize_arguments,
    quantize_constants,
    rounded,
    whole_factor,
    write_quantized,
)
from megalight.ops.rotary import rotate_qkv
from megalight.registry import Backend, BackendRegistry, choose

TOKENS = 32
"""Tokens of a program."""
TOGETHER = 8
"""Heads of a program, at most: they share cosines and sines."""
WARPS = 8


@jit
def _backward(
    q: Value, k: Value, v: Value, cos: Value, sin: Value, row_data: Value, row_scale: Value, row_amax: Value,
    column_data: Value, column_scale: Value, column_amax: Value, parts: Value,
    tokens: Value, padded: Value, q_token: Value, q_head: Value, k_token: Value, k_head: Value, v_token: Value,
    v_head: Value,
    HEADS: constexpr, KV_HEADS: constexpr, HALF: constexpr, GROUP: constexpr, ROWS: constexpr, COLUMNS: constexpr,
    ROW_LARGEST: constexpr, COLUMN_LARGEST: constexpr, SMALLEST: constexpr, ROW_POWER: constexpr,
    COLUMN_POWER: constexpr, FULL: constexpr, HARDWARE: constexpr, TOKENS: constexpr,
) -> None:  # fmt: skip
    # A program's heads are all of queries, all of keys, or all of values.
    group, token = tl.program_id(0), tl.program_id(1) * TOKENS
    t = tl.arange(0, TOKENS)[:, None]
    f = tl.arange(0, HALF)[None, :]
    inside = token + t < tokens
    place = token.to(tl.int64) * HALF + (t * HALF + f)
    c = tl.load(cos + place, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + place, mask=inside, other=0.0).to(tl.float32)
    first = group * GROUP
    long = token.to(tl.int64)
    if first < HEADS:
        source = q + long * q_token + first * q_head
        step = q_token
        next_head = q_head
    elif first < HEADS + KV_HEADS:
        source = k + long * k_token + (first - HEADS) * k_head
        step = k_token
        next_head = k_head
    else:
        source = v + long * v_token + (first - HEADS - KV_HEADS) * v_head
        step = v_token
        next_head = v_head
    turned = first < HEADS + KV_HEADS
    features = (HEADS + 2 * KV_HEADS) * 2 * HALF
    start = (group == 0) & (token == 0)
    row_factor = whole_factor(row_amax, row_scale, start, ROWS, ROW_LARGEST, SMALLEST, ROW_POWER)
    column_factor = whole_factor(column_amax, column_scale, start, COLUMNS, COLUMN_LARGEST, SMALLEST, COLUMN_POWER)
    largest = 0.0
    for head in range(GROUP):
        where = source + head * next_head + (t * step + f)
        if FULL:
            a = tl.load(where).to(tl.float32)
            b = tl.load(where + HALF).to(tl.float32)
        else:
            a = tl.load(where, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(where + HALF, mask=inside, other=0.0).to(tl.float32)
        # The inverse rotation, by the negative angle. Rounded as if it were written.
        one = rounded(tl.where(turned, a * c - b * -s, a), q, HARDWARE)
        two = rounded(tl.where(turned, a * -s + b * c, b), q, HARDWARE)
        largest = tl.maximum(largest, tl.max(tl.max(tl.maximum(tl.abs(one), tl.abs(two)), 1), 0))
        feature = (first + head) * 2 * HALF
        write_quantized(
            one, row_data, row_factor, column_data, column_factor,
            token, feature, tokens, padded, features, features,
            ROWS, COLUMNS, FULL, TOKENS, HALF,
        )  # fmt: skip
        write_quantized(
            two, row_data, row_factor, column_data, column_factor,
            token, feature + HALF, tokens, padded, features, features,
            ROWS, COLUMNS, FULL, TOKENS, HALF,
        )  # fmt: skip
    tl.store(parts + tl.program_id(1) * tl.num_programs(0) + group, largest)


def _together(heads: int, kv_heads: int) -> int:
    """Return how many heads a program serves: so many of queries, of keys and of values are a multiple of it."""
    group = TOGETHER
    while heads % group or kv_heads % group:
        group //= 2
    return group


def triton_cast_qkv_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    rows: Scheme | None,
    columns: Scheme | None,
    amax: Tensor,
) -> QuantizedCasts:
    """Implement :func:`megalight.ops.rotary.quantized.cast_qkv_gradient`; ``interleaved`` is not served."""
    q, k, v = (last_contiguous(x) for x in (q, k, v))
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    features = (heads + 2 * kv_heads) * head_dim
    padded = tokens if columns is None else tokens + -tokens % columns.multiple
    whole = None if rows is None else empty_quantized(q, rows, tokens, features)
    transposed = None if columns is None else empty_quantized(q, columns, features, padded)
    group = _together(heads, kv_heads)
    grid = (heads + 2 * kv_heads) // group, cdiv(padded, TOKENS)
    parts = torch.empty(grid[0] * grid[1], device=q.device)
    if tokens:
        _backward[grid](
            q, k, v, cos.contiguous(), sin.contiguous(), *quantize_arguments(q, whole, amax),
            *quantize_arguments(q, transposed, amax), parts, tokens, padded, *q.stride()[:2], *k.stride()[:2],
            *v.stride()[:2],
            HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, GROUP=group, **quantize_constants(rows, columns),
            FULL=tokens % TOKENS == 0, HARDWARE=q.is_cuda, TOKENS=TOKENS, num_warps=WARPS,
        )  # fmt: skip
    return (whole, transposed), parts


class QuantizedRotarySpec(NamedTuple):
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
    [Tensor, Tensor, Tensor, Tensor, Tensor, bool, Scheme | None, Scheme | None, Tensor], QuantizedCasts
]
CAST_QKV_GRADIENT: BackendRegistry[QuantizedRotarySpec, CastGradient] = BackendRegistry("cast_qkv_gradient")


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
) -> QuantizedCasts:
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
    spec = QuantizedRotarySpec(
        q.device.type, q.dtype, cos.dtype, q.shape[2], 2 * cos.shape[1], interleaved, rows, columns
    )
    return choose(CAST_QKV_GRADIENT, spec, backend)(q, k, v, cos, sin, interleaved, rows, columns, amax)


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
) -> QuantizedCasts:
    with torch.enable_grad():
        # The rotation is linear, so its gradient does not depend on where it is taken.
        leaf = q.new_empty(len(q), (q.shape[1] + 2 * k.shape[1]) * q.shape[2]).requires_grad_()
        out = rotate_qkv(leaf, q.shape[1], k.shape[1], q.shape[2], cos, sin, interleaved)
        (packed,) = torch.autograd.grad(out, leaf, (q, k, v))
    return cast(packed, rows, columns, amax=amax, amax_t=amax), amax_of(packed)


def _triton_why_not(spec: QuantizedRotarySpec) -> str | None:
    if spec.interleaved or spec.rotated != spec.head_dim or spec.head_dim not in (32, 64, 128, 256):
        return "serves heads of 32, 64, 128 or 256 features, all rotated, in pairs half a head apart"
    why_not = whole_cast_why_not(spec.dtype, spec.rows, spec.columns)
    return why_not or triton_why_not(spec.device, spec.dtype, spec.table_dtype)


CAST_QKV_GRADIENT.register(Backend("triton", triton_cast_qkv_gradient, 10, _triton_why_not))
CAST_QKV_GRADIENT.register(Backend("reference", _reference, 0, serve_all))


class _RotateElided(torch.autograd.Function):
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
        return elided_output((len(q), ctx.features), q, make), None, None, None, None, None


def rotate_qkv_elided(
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

    It is elided (:mod:`megalight.ops.autograd`): ``qkv`` must come from a GEMM in 8 bits that knows its scales
    beforehand.
    """
    heads = num_heads, num_kv_heads, head_dim
    out: tuple[Tensor, Tensor, Tensor] = apply(_RotateElided, qkv, heads, cos, sin, interleaved, backend)
    return out
