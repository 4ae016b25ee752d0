"""The gradient of a packed projection as codes: gradients of its heads are read once, and codes written both ways."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.jit import Value, cdiv, constexpr, jit, tl
from megalight.ops.quantize import Scheme
from megalight.ops.quantize.triton import (
    codes_arguments,
    codes_constants,
    empty_codes,
    rounded,
    whole_factor,
    write_codes,
)
from megalight.ops.unwritten import Told

TOKENS = 32
"""Tokens of a program."""
TOGETHER = 8
"""Heads of a program, at most: they share cosines and sines."""
WARPS = 8


@jit
def _backward(
    q: Value,
    k: Value,
    v: Value,
    cos: Value,
    sin: Value,
    row_codes: Value,
    row_scale: Value,
    row_amax: Value,
    column_codes: Value,
    column_scale: Value,
    column_amax: Value,
    parts: Value,
    tokens: Value,
    padded: Value,
    q_token: Value,
    q_head: Value,
    k_token: Value,
    k_head: Value,
    v_token: Value,
    v_head: Value,
    HEADS: constexpr,
    KV_HEADS: constexpr,
    HALF: constexpr,
    GROUP: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    ROW_LARGEST: constexpr,
    COLUMN_LARGEST: constexpr,
    SMALLEST: constexpr,
    ROW_POWER: constexpr,
    COLUMN_POWER: constexpr,
    FULL: constexpr,
    HARDWARE: constexpr,
    TOKENS: constexpr,
) -> None:
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
        write_codes(
            one, row_codes, row_factor, column_codes, column_factor,
            token, feature, tokens, padded, features, features,
            ROWS, COLUMNS, FULL, TOKENS, HALF,
        )  # fmt: skip
        write_codes(
            two, row_codes, row_factor, column_codes, column_factor,
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
) -> Told:
    """Implement :func:`megalight.ops.rotary.codes.cast_qkv_gradient`; ``interleaved`` is not served."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    features = (heads + 2 * kv_heads) * head_dim
    padded = tokens if columns is None else tokens + -tokens % columns.multiple
    whole = None if rows is None else empty_codes(q, rows, tokens, features)
    transposed = None if columns is None else empty_codes(q, columns, features, padded)
    group = _together(heads, kv_heads)
    grid = (heads + 2 * kv_heads) // group, cdiv(padded, TOKENS)
    parts = torch.empty(grid[0] * grid[1], device=q.device)
    if tokens:
        _backward[grid](
            q,
            k,
            v,
            cos.contiguous(),
            sin.contiguous(),
            *codes_arguments(q, whole, amax),
            *codes_arguments(q, transposed, amax),
            parts,
            tokens,
            padded,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=head_dim // 2,
            GROUP=group,
            **codes_constants(rows, columns),
            FULL=tokens % TOKENS == 0,
            HARDWARE=q.is_cuda,
            TOKENS=TOKENS,
            num_warps=WARPS,
        )
    return (whole, transposed), parts
