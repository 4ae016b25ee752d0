"""Rotary embedding in one kernel; the backward rotates by the negative angle. A program serves all heads of a token."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.common import last_contiguous
from megalight.ops.jit import Value, constexpr, jit, next_power, tl
from megalight.ops.quantize.amax_history import annotate_amax


@jit
def turn(
    source: Value, target: Value, source_head: Value, target_head: Value, cos: Value, sin: Value,
    HEADS: constexpr, HEAD_BLOCK: constexpr, HALF: constexpr, HALF_BLOCK: constexpr, REST: constexpr,
    REST_BLOCK: constexpr, INTERLEAVED: constexpr, TURN: constexpr,
) -> Value:  # fmt: skip
    """Rotate the heads of one token from ``source`` to ``target``. Without ``TURN``, copy them.

    Returns the largest magnitude that was written, in float32.
    """
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < HEADS) & (pair < HALF)
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + HALF
    a = tl.load(source + head * source_head + first, mask=inside, other=0.0)
    b = tl.load(source + head * source_head + second, mask=inside, other=0.0)
    if TURN:
        # The rotation subtracts products of similar size: in half precision the difference would lose most of its
        # digits.
        a32 = a.to(tl.float32)
        b32 = b.to(tl.float32)
        a = (a32 * cos - b32 * sin).to(target.dtype.element_ty)
        b = (a32 * sin + b32 * cos).to(target.dtype.element_ty)
    tl.store(target + head * target_head + first, a, mask=inside)
    tl.store(target + head * target_head + second, b, mask=inside)
    largest = tl.max(tl.max(tl.maximum(tl.abs(a.to(tl.float32)), tl.abs(b.to(tl.float32))), 1), 0)
    if REST > 0:
        # Partial rotary embedding: features after the rotated ones are copied.
        rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        inside = (head < HEADS) & (rest < 2 * HALF + REST)
        kept = tl.load(source + head * source_head + rest, mask=inside, other=0.0)
        tl.store(target + head * target_head + rest, kept, mask=inside)
        largest = tl.maximum(largest, tl.max(tl.max(tl.abs(kept.to(tl.float32)), 1), 0))
    return largest


@jit
def _apply(
    source: Value, target: Value, cos: Value, sin: Value, source_token: Value, source_head: Value, target_token: Value,
    target_head: Value,
    HEADS: constexpr, HEAD_BLOCK: constexpr, HALF: constexpr, HALF_BLOCK: constexpr, REST: constexpr,
    REST_BLOCK: constexpr, INTERLEAVED: constexpr, BACKWARD: constexpr,
) -> None:  # fmt: skip
    # 64 bits: token times row may pass 2^31.
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    # The inverse rotation, which is also the transposed one.
    if BACKWARD:
        s = -s
    turn(
        source + token * source_token,
        target + token * target_token,
        source_head,
        target_head,
        c,
        s,
        HEADS,
        HEAD_BLOCK,
        HALF,
        HALF_BLOCK,
        REST,
        REST_BLOCK,
        INTERLEAVED,
        True,
    )


@jit
def _qkv(
    packed: Value, q: Value, k: Value, v: Value, cos: Value, sin: Value, parts: Value, packed_token: Value,
    q_token: Value, q_head: Value, k_token: Value, k_head: Value, v_token: Value, v_head: Value,
    HEADS: constexpr, HEAD_BLOCK: constexpr, KV_HEADS: constexpr, KV_BLOCK: constexpr, HEAD_DIM: constexpr,
    HALF: constexpr, HALF_BLOCK: constexpr, REST: constexpr, REST_BLOCK: constexpr, INTERLEAVED: constexpr,
    BACKWARD: constexpr, MEASURE: constexpr,
) -> None:  # fmt: skip
    """Forward: from the packed projection to q, k, v. Backward: from gradients of q, k, v to the packed gradient."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    packed_q = packed + token * packed_token
    # One row of the packed projection: query heads, key heads, value heads.
    packed_k = packed_q + HEADS * HEAD_DIM
    packed_v = packed_k + KV_HEADS * HEAD_DIM
    q += token * q_token
    k += token * k_token
    v += token * v_token
    # fmt: off
    if BACKWARD:
        # The rotation is orthogonal, so its gradient is the rotation by the negative angle.
        s = -s
        of_q = turn(q, packed_q, q_head, HEAD_DIM, c, s,
                     HEADS, HEAD_BLOCK, HALF, HALF_BLOCK, REST, REST_BLOCK, INTERLEAVED, True)
        of_k = turn(k, packed_k, k_head, HEAD_DIM, c, s,
                     KV_HEADS, KV_BLOCK, HALF, HALF_BLOCK, REST, REST_BLOCK, INTERLEAVED, True)
        of_v = turn(v, packed_v, v_head, HEAD_DIM, c, s,
                     KV_HEADS, KV_BLOCK, HALF, HALF_BLOCK, REST, REST_BLOCK, INTERLEAVED, False)
        if MEASURE:
            tl.store(parts + token, tl.maximum(of_q, tl.maximum(of_k, of_v)))
    else:
        turn(packed_q, q, HEAD_DIM, q_head, c, s,
              HEADS, HEAD_BLOCK, HALF, HALF_BLOCK, REST, REST_BLOCK, INTERLEAVED, True)
        turn(packed_k, k, HEAD_DIM, k_head, c, s,
              KV_HEADS, KV_BLOCK, HALF, HALF_BLOCK, REST, REST_BLOCK, INTERLEAVED, True)
        turn(packed_v, v, HEAD_DIM, v_head, c, s,
              KV_HEADS, KV_BLOCK, HALF, HALF_BLOCK, REST, REST_BLOCK, INTERLEAVED, False)
    # fmt: on


@lru_cache
def _shape(head_dim: int, half: int) -> dict[str, int]:
    rest = head_dim - 2 * half
    return {"HALF": half, "HALF_BLOCK": next_power(half), "REST": rest, "REST_BLOCK": next_power(rest)}


@lru_cache
def _heads(heads: int, kv_heads: int, head_dim: int, half: int) -> dict[str, int]:
    """Return what the kernel of packed projections is compiled for, and its warps."""
    return {
        "HEADS": heads,
        "HEAD_BLOCK": next_power(heads),
        "KV_HEADS": kv_heads,
        "KV_BLOCK": next_power(kv_heads),
        "HEAD_DIM": head_dim,
        **_shape(head_dim, half),
        # More warps for wide tokens, as one program serves all heads.
        "num_warps": 4 if heads * head_dim <= 8192 else 8,
    }


def _run_apply(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> Tensor:
    x = last_contiguous(x)
    tokens, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        # More warps for wide tokens, as one program serves all heads.
        _apply[(tokens,)](
            x, out, cos, sin, *x.stride()[:2], *out.stride()[:2],
            HEADS=heads, HEAD_BLOCK=next_power(heads), **_shape(head_dim, cos.shape[-1]), INTERLEAVED=interleaved,
            BACKWARD=backward, num_warps=4 if heads * head_dim <= 8192 else 8,
        )  # fmt: skip
    return out


def _run_qkv(
    packed: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    backward: bool,
    parts: Tensor | None = None,
) -> None:
    """Run the kernel. ``parts [T]`` receives the largest magnitude of each token's packed gradient."""
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if tokens:
        _qkv[(tokens,)](
            packed, q, k, v, cos, sin, parts, packed.stride(0), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            **_heads(heads, kv_heads, head_dim, cos.shape[-1]), INTERLEAVED=interleaved, BACKWARD=backward,
            MEASURE=parts is not None,
        )  # fmt: skip


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        # Angles only: the input is not needed, as the rotation is linear.
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _run_apply(x, cos, sin, interleaved, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _run_apply(grad, cos, sin, ctx.interleaved, True), None, None, None


class _RotateQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        measure: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.features, ctx.measure = interleaved, qkv.shape[1], measure
        tokens = qkv.shape[0]
        q = qkv.new_empty(tokens, num_heads, head_dim)
        k = qkv.new_empty(tokens, num_kv_heads, head_dim)
        v = qkv.new_empty(tokens, num_kv_heads, head_dim)
        _run_qkv(last_contiguous(qkv), q, k, v, cos, sin, interleaved, False)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        packed = grad_q.new_empty(grad_q.shape[0], ctx.features)
        # The gradient of the projection's output is cast to 8 bits next: its magnitude is found while it is written.
        parts = packed.new_empty(len(packed), dtype=torch.float32) if ctx.measure else None
        q, k, v = map(last_contiguous, (grad_q, grad_k, grad_v))
        _run_qkv(packed, q, k, v, cos, sin, ctx.interleaved, True, parts)
        if parts is not None:
            annotate_amax(packed, parts)
        return packed, None, None, None, None, None, None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first features of ``x [T, H, D]``."""
    # The kernel reads tables row by row, without strides.
    out: Tensor = apply(_Apply, x, cos.contiguous(), sin.contiguous(), interleaved)
    return out


def rotate_qkv(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    measure: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection into contiguous q, k, v, and rotate q and k, in one kernel.

    With ``measure``, the backward also finds the largest magnitude of the gradient of ``qkv``.
    """
    out: tuple[Tensor, Tensor, Tensor] = apply(
        _RotateQKV, qkv, num_heads, num_kv_heads, head_dim, cos.contiguous(), sin.contiguous(), interleaved, measure
    )
    return out
