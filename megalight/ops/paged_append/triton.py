"""Rotations and stores of new tokens in one kernel: a program serves all heads of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.common import last_contiguous
from megalight.ops.jit import OVERLAP, Value, constexpr, jit, next_power, start_dependents, tl, triton
from megalight.ops.rotary.triton import turn

CONTIGUOUS = torch.contiguous_format


# Rows to write begin anywhere in a buffer of a step's integers.
@triton.jit(do_not_specialize_on_alignment=["write"])  # type: ignore[untyped-decorator]
def _append(
    q: Value, k: Value, v: Value, out: Value, k_pool: Value, v_pool: Value, write: Value, cos: Value, sin: Value,
    q_token: Value, q_head: Value, k_token: Value, k_head: Value, v_token: Value, v_head: Value,
    HEADS: constexpr, HEAD_BLOCK: constexpr, KV_HEADS: constexpr, KV_BLOCK: constexpr, HEAD_DIM: constexpr,
    VALUE_DIM: constexpr, HALF: constexpr, HALF_BLOCK: constexpr, REST: constexpr, REST_BLOCK: constexpr,
    VALUE_HALF: constexpr, VALUE_BLOCK: constexpr, INTERLEAVED: constexpr, ROTATE: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    # 64 bits: rows of a pool times their width pass 2^31.
    token = tl.program_id(0).to(tl.int64)
    # Rows and angles are read before the wait: the kernel before this one makes queries, keys and values.
    row = tl.load(write + token)
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    c = pair.to(tl.float32)
    s = c
    if ROTATE:
        c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    start_dependents(PDL)
    # fmt: off
    turn(q + token * q_token, out + token * HEADS * HEAD_DIM, q_head, HEAD_DIM, c, s,
         HEADS, HEAD_BLOCK, HALF, HALF_BLOCK, REST, REST_BLOCK, INTERLEAVED, ROTATE)
    turn(k + token * k_token, k_pool + row * KV_HEADS * HEAD_DIM, k_head, HEAD_DIM, c, s,
         KV_HEADS, KV_BLOCK, HALF, HALF_BLOCK, REST, REST_BLOCK, INTERLEAVED, ROTATE)
    turn(v + token * v_token, v_pool + row * KV_HEADS * VALUE_DIM, v_head, VALUE_DIM, c, s,
         KV_HEADS, KV_BLOCK, VALUE_HALF, VALUE_BLOCK, VALUE_DIM - 2 * VALUE_HALF, 1, False, False)
    # fmt: on


@jit
def _scale_of(x: Value) -> Value:
    """``[H, D] -> [H]``: what the largest magnitude of a head is 448 times of; 1 where all are 0."""
    scale = tl.max(tl.abs(x), 1) / 448.0
    return tl.where(scale == 0, 1.0, scale)


@jit
def _quantize(
    rows: Value, pool: Value, scales: Value, write: Value,
    HEADS: constexpr, HEAD_BLOCK: constexpr, DIM: constexpr, DIM_BLOCK: constexpr,
) -> None:  # fmt: skip
    """Store the heads of a token in e4m3, each with its own scale."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(write + token)
    head = tl.arange(0, HEAD_BLOCK)
    place = head[:, None] * DIM + tl.arange(0, DIM_BLOCK)[None, :]
    inside = (head < HEADS)[:, None] & (tl.arange(0, DIM_BLOCK) < DIM)[None, :]
    x = tl.load(rows + token * HEADS * DIM + place, mask=inside, other=0.0).to(tl.float32)
    scale = _scale_of(x)
    data = (x / scale[:, None]).to(pool.dtype.element_ty)
    tl.store(pool + row * HEADS * DIM + place, data, mask=inside)
    tl.store(scales + row * HEADS + head, scale, mask=head < HEADS)


# Rows to write begin anywhere in a buffer of a step's integers.
@triton.jit(do_not_specialize_on_alignment=["write"])  # type: ignore[untyped-decorator]
def _append_latent(
    latent: Value, key: Value, latent_pool: Value, rotary_pool: Value, scales: Value, write: Value, latent_token: Value,
    key_token: Value,
    RANK: constexpr, RANK_BLOCK: constexpr, ROTARY: constexpr, ROTARY_BLOCK: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Store the latent of a token in e4m3, and its rotated key."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(write + token)
    start_dependents(PDL)
    feature = tl.arange(0, RANK_BLOCK)[None, :]
    x = tl.load(latent + token * latent_token + feature, mask=feature < RANK, other=0.0).to(tl.float32)
    scale = _scale_of(x)
    data = (x / scale[:, None]).to(latent_pool.dtype.element_ty)
    tl.store(latent_pool + row * RANK + feature, data, mask=feature < RANK)
    tl.store(scales + row + tl.arange(0, 1), scale)
    turned = tl.arange(0, ROTARY_BLOCK)
    value = tl.load(key + token * key_token + turned, mask=turned < ROTARY)
    tl.store(rotary_pool + row * ROTARY + turned, value, mask=turned < ROTARY)


def append_latents(
    latent: Tensor, key: Tensor, latent_pool: Tensor, rotary_pool: Tensor, scales: Tensor, write: Tensor
) -> None:
    """See :func:`megalight.ops.paged_append.append_latents`."""
    latent, key = (last_contiguous(t) for t in (latent, key))
    pdl = OVERLAP.on
    _append_latent[(len(latent),)](
        *(latent, key, latent_pool, rotary_pool, scales, write, latent.stride(0), key.stride(0)),
        RANK=latent.shape[1], RANK_BLOCK=next_power(latent.shape[1]), ROTARY=key.shape[1],
        ROTARY_BLOCK=next_power(key.shape[1]), PDL=pdl, launch_pdl=pdl, num_warps=2,
    )  # fmt: skip


def paged_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    write: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    scales: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """See :func:`megalight.ops.paged_append.paged_append`."""
    if scales is not None:
        turned, copied = torch.empty_like(k, memory_format=CONTIGUOUS), torch.empty_like(v, memory_format=CONTIGUOUS)
        places = torch.arange(len(k), device=k.device)
        out = paged_append(q, k, v, turned, copied, places, cos, sin, interleaved, None)
        for rows, pool, scale in zip((turned, copied), (k_pool, v_pool), scales, strict=True):
            _, heads, size = rows.shape
            _quantize[(len(rows),)](
                *(rows, pool, scale, write),
                HEADS=heads, HEAD_BLOCK=next_power(heads), DIM=size, DIM_BLOCK=next_power(size),
            )  # fmt: skip
        return out
    (tokens, heads, size), kv_heads, value_size = q.shape, k.shape[1], v.shape[-1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    half = size // 2 if cos is None else cos.shape[-1]
    pdl = OVERLAP.on
    q, k, v = (last_contiguous(t) for t in (q, k, v))
    _append[(tokens,)](
        *(q, k, v, out, k_pool, v_pool, write, cos, sin), *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        HEADS=heads, HEAD_BLOCK=next_power(heads), KV_HEADS=kv_heads, KV_BLOCK=next_power(kv_heads), HEAD_DIM=size,
        VALUE_DIM=value_size, HALF=half, HALF_BLOCK=next_power(half), REST=size - 2 * half,
        REST_BLOCK=next_power(size - 2 * half), VALUE_HALF=value_size // 2, VALUE_BLOCK=next_power(value_size // 2),
        INTERLEAVED=interleaved, ROTATE=cos is not None, PDL=pdl, launch_pdl=pdl,
        num_warps=4 if heads * size <= 8192 else 8,
    )  # fmt: skip
    return out
