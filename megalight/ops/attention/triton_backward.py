"""The backward pass of attention in Triton: a kernel for queries, and one for keys and values of any heads.

Both compute the scores, which makes seven products where five would do. One kernel for all, which adds to the gradients
of queries in memory, was slower in plain Triton; on Hopper there is one with roles for warps
(:mod:`megalight.ops.attention.hopper`). With two kernels sums come in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention.triton_blocks import (
    Descriptor,
    described,
    factors,
    flags,
    key_blocks,
    keys_of,
    queries_of,
    query_blocks,
    sequence,
    shape_of,
    start_of,
    steps_of,
    tanh,
    visible,
)
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl
from megalight.types import PackedSequences

QUERIES: dict[str, Any] = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}
"""The same for the gradient of queries."""

KEYS: dict[str, Any] = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2}
"""Keys of a program, and queries of one of its steps, for the gradients of keys and values."""

WIDE_QUERIES: dict[str, Any] = {"ROWS": 64, "KEYS": 32, "num_warps": 4, "num_stages": 2}
WIDE_KEYS: dict[str, Any] = {"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 1}
"""The same for wide heads. All are the fastest of 5 to 20 on an H200."""

DELTA = 64
"""Rows of a program that multiplies outputs and their gradients."""


@jit
def _attention_delta(
    out: Value, grad: Value, delta: Value, tokens: Value, heads: Value, value_dim: Value,
    VALUES: constexpr, ROWS: constexpr,
) -> None:  # fmt: skip
    """``[T, H, Dv] x [T, H, Dv] -> [H, T]``: the sums over features of outputs times their gradients."""
    head = tl.program_id(0)
    rows, values = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, VALUES)
    place = (rows.to(tl.int64) * heads + head)[:, None] * value_dim + values[None, :]
    mask = (rows < tokens)[:, None] & (values < value_dim)[None, :]
    x = tl.load(out + place, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(delta + head * tokens + rows, tl.sum(x * y, 1), mask=rows < tokens)


@jit
def _query_range(
    total: Value, query: Value, pulled: Value, k: Value, v: Value, lse: Value, delta: Value, key_start: Value,
    head: Value, places: Value, num_keys: Value, window: Value, scale: Value, cap: Value, begin: Value, edge: Value,
    whole: Value, stop: Value,
    CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr, MASKED: constexpr,
    COUNT: constexpr, FEATURES: constexpr, VALUES: constexpr,
) -> Any:  # fmt: skip
    """Add what the keys of ranges give to the gradient of queries."""
    for index in tl.range(0, steps_of(begin, edge, whole, stop, MASKED, COUNT)):
        start = start_of(index, begin, edge, whole, MASKED, COUNT)
        key = k.load([key_start + start, head, 0]).reshape(COUNT, FEATURES)
        value = v.load([key_start + start, head, 0]).reshape(COUNT, VALUES)
        scores = tl.dot(query, key.T)
        if CAPPED:
            curved = tanh(scores * scale, FAST)
            scores = curved * cap
        else:
            scores *= scale
        weights = tl.exp2(scores - lse[:, None])
        if MASKED:
            keys = start + tl.arange(0, COUNT)
            seen = visible(places[:, None], keys[None, :], num_keys, window, CAUSAL, WINDOW)
            weights = tl.where(seen, weights, 0.0)
        slopes = weights * (tl.dot(pulled, value.T) - delta[:, None])
        if CAPPED:
            slopes *= 1 - curved * curved
        total = tl.dot(slopes.to(key.dtype), key, total)
    return total


@jit
def _attention_queries(
    q: Value, k: Value, v: Value, grad: Value, lse: Value, delta: Value, out: Value, table: Value, scale: Value,
    cap: Value, slope: Value, window: Value, tokens: Value, heads: Value, dim: Value,
    GROUP: constexpr, CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr,
    FEATURES: constexpr, VALUES: constexpr, ROWS: constexpr, KEYS: constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(0)
    start, length, key_start, num_keys, first = sequence(table, tl.program_id(1))
    rows = first + tl.arange(0, ROWS)
    within = rows < length
    places = rows + num_keys - length
    query = q.load([start + first, head, 0]).reshape(ROWS, FEATURES)
    pulled = grad.load([start + first, head, 0]).reshape(ROWS, VALUES)
    row_lse = tl.load(lse + head * tokens + start + rows, mask=within, other=float("inf"))
    row_delta = tl.load(delta + head * tokens + start + rows, mask=within, other=0.0)
    total = tl.zeros((ROWS, FEATURES), tl.float32)
    begin, edge, whole, stop = keys_of(first, length, num_keys, window, CAUSAL, WINDOW, ROWS, KEYS)
    total = _query_range(
        total, query, pulled, k, v, row_lse, row_delta, key_start, head // GROUP, places, num_keys, window, scale,
        cap, begin, edge, whole, stop, CAUSAL, WINDOW, CAPPED, FAST, False, KEYS, FEATURES, VALUES,
    )  # fmt: skip
    total = _query_range(
        total, query, pulled, k, v, row_lse, row_delta, key_start, head // GROUP, places, num_keys, window, scale,
        cap, begin, edge, whole, stop, CAUSAL, WINDOW, CAPPED, FAST, True, KEYS, FEATURES, VALUES,
    )  # fmt: skip
    features = tl.arange(0, FEATURES)
    place = ((start + rows).to(tl.int64) * heads + head)[:, None] * dim + features[None, :]
    total = (total * slope).to(out.dtype.element_ty)
    tl.store(out + place, total, mask=within[:, None] & (features < dim)[None, :])


@jit
def _key_range(
    key_total: Value, value_total: Value, key: Value, value: Value, q: Value, grad: Value, lse: Value, delta: Value,
    query_start: Value, head: Value, length: Value, keys: Value, shift: Value, num_keys: Value, window: Value,
    scale: Value, cap: Value, begin: Value, stop: Value,
    CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr, MASKED: constexpr,
    COUNT: constexpr, FEATURES: constexpr, VALUES: constexpr,
) -> Any:  # fmt: skip
    """Add what the queries of a range give to the gradients of keys and values."""
    for start in tl.range(begin, stop, COUNT):
        rows = start + tl.arange(0, COUNT)
        query = q.load([query_start + start, head, 0]).reshape(COUNT, FEATURES)
        pulled = grad.load([query_start + start, head, 0]).reshape(COUNT, VALUES)
        # Rows of the next sequence get weights of 0.
        row_lse = tl.load(lse + rows, mask=rows < length, other=float("inf"))
        row_delta = tl.load(delta + rows, mask=rows < length, other=0.0)
        scores = tl.dot(query, key.T)
        if CAPPED:
            curved = tanh(scores * scale, FAST)
            scores = curved * cap
        else:
            scores *= scale
        weights = tl.exp2(scores - row_lse[:, None])
        if MASKED:
            seen = visible((rows + shift)[:, None], keys[None, :], num_keys, window, CAUSAL, WINDOW)
            weights = tl.where(seen, weights, 0.0)
        value_total = tl.dot(weights.to(pulled.dtype).T, pulled, value_total)
        slopes = weights * (tl.dot(pulled, value.T) - row_delta[:, None])
        if CAPPED:
            slopes *= 1 - curved * curved
        key_total = tl.dot(slopes.to(query.dtype).T, query, key_total)
    return key_total, value_total


@jit
def _backward_attention_keys(
    q: Value, k: Value, v: Value, grad: Value, lse: Value, delta: Value, key_out: Value, value_out: Value, table: Value,
    scale: Value, cap: Value, slope: Value, window: Value, tokens: Value, key_heads: Value, dim: Value,
    value_dim: Value,
    GROUP: constexpr, CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr,
    FEATURES: constexpr, VALUES: constexpr, ROWS: constexpr, KEYS: constexpr,
) -> None:  # fmt: skip
    key_head = tl.program_id(0)
    start, length, key_start, num_keys, first = sequence(table, tl.program_id(1))
    keys = first + tl.arange(0, KEYS)
    shift = num_keys - length
    key = k.load([key_start + first, key_head, 0]).reshape(KEYS, FEATURES)
    value = v.load([key_start + first, key_head, 0]).reshape(KEYS, VALUES)
    key_total = tl.zeros((KEYS, FEATURES), tl.float32)
    value_total = tl.zeros((KEYS, VALUES), tl.float32)
    begin, edge, whole, stop = queries_of(first, length, shift, window, CAUSAL, WINDOW, ROWS, KEYS)
    edge = tl.minimum(tl.maximum(edge, begin), tl.maximum(stop, begin))
    whole = tl.maximum(whole, edge)
    for member in range(GROUP):
        head = key_head * GROUP + member
        row_lse = lse + head * tokens + start
        row_delta = delta + head * tokens + start
        key_total, value_total = _key_range(
            key_total, value_total, key, value, q, grad, row_lse, row_delta, start, head, length, keys, shift, num_keys,
            window, scale, cap, begin, edge, CAUSAL, WINDOW, CAPPED, FAST, True, ROWS, FEATURES, VALUES,
        )  # fmt: skip
        key_total, value_total = _key_range(
            key_total, value_total, key, value, q, grad, row_lse, row_delta, start, head, length, keys, shift, num_keys,
            window, scale, cap, edge, whole, CAUSAL, WINDOW, CAPPED, FAST, False, ROWS, FEATURES, VALUES,
        )  # fmt: skip
        if WINDOW:
            key_total, value_total = _key_range(
                key_total, value_total, key, value, q, grad, row_lse, row_delta, start, head, length, keys, shift,
                num_keys, window, scale, cap, whole, stop, CAUSAL, WINDOW, CAPPED, FAST, True, ROWS, FEATURES, VALUES,
            )  # fmt: skip
    within = keys < num_keys
    row = (key_start + keys).to(tl.int64) * key_heads + key_head
    features = tl.arange(0, FEATURES)
    tl.store(
        key_out + row[:, None] * dim + features[None, :],
        (key_total * slope).to(key_out.dtype.element_ty),
        mask=within[:, None] & (features < dim)[None, :],
    )
    values = tl.arange(0, VALUES)
    tl.store(
        value_out + row[:, None] * value_dim + values[None, :],
        value_total.to(value_out.dtype.element_ty),
        mask=within[:, None] & (values < value_dim)[None, :],
    )


def run_delta(out: Tensor, grad: Tensor) -> Tensor:
    """Return the sums over features of outputs times their gradients, ``[T, H, Dv] x [T, H, Dv] -> [H, T]``."""
    tokens, heads, value_dim = out.shape
    delta = torch.empty(heads, tokens, dtype=torch.float32, device=out.device)
    grid = (heads, cdiv(tokens, DELTA))
    _attention_delta[grid](
        out, grad, delta, tokens, heads, value_dim, VALUES=next_power(value_dim), ROWS=DELTA, num_warps=4
    )
    return delta


def of_queries(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    sequences: PackedSequences,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Return the gradient of queries."""
    (tokens, heads, dim), keys = q.shape, sequences.keys or sequences
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shape = shape_of(QUERIES, WIDE_QUERIES, q, v)
    table = query_blocks(sequences.lengths, keys.lengths, shape["ROWS"], causal, window, q.device)
    _attention_queries[(heads, len(table))](
        *(described(q, shape["ROWS"]), described(k, shape["KEYS"]), described(v, shape["KEYS"])),
        *(described(grad, shape["ROWS"]), lse, delta, out, table),
        *(*factors(scale, softcap), scale, window or 0, tokens, heads, dim),
        **flags(q, k, causal, window, softcap),
        **shape,
    )
    return out


def of_keys(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    sequences: PackedSequences,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and values."""
    (tokens, _, dim), (_, key_heads, value_dim), keys = q.shape, v.shape, sequences.keys or sequences
    grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    shape = shape_of(KEYS, WIDE_KEYS, q, v)
    table = key_blocks(sequences.lengths, keys.lengths, shape["KEYS"], causal, window, q.device)
    _backward_attention_keys[(key_heads, len(table))](
        *(described(q, shape["ROWS"]), described(k, shape["KEYS"]), described(v, shape["KEYS"])),
        *(described(grad, shape["ROWS"]), lse, delta, grad_k, grad_v, table),
        *(*factors(scale, softcap), scale, window or 0, tokens, key_heads, dim, value_dim),
        **flags(q, k, causal, window, softcap),
        **shape,
    )
    return grad_k, grad_v


# Scores lie as keys times queries, so that what comes of them is a left factor in registers as it is, and blocks are
# loaded from matrices of two dimensions. Queries that see all keys of a block are in a loop without a mask, and all
# the others in a second one. Both go over all heads of a group, as each loop begins with loads that nothing hides:
# with loops for each head and each edge there were twelve for four heads. Almost nothing spills, and two programs
# share an SM.
BLOCKS: dict[str, Any] = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2}
"""Keys of a program, and queries of one of its steps."""

SIZES = (64, 128)
"""Features of heads that the kernel serves: powers of two, for a block of a matrix has no others."""


@jit
def _range(
    key_total: Value, value_total: Value, key: Value, value: Value, q: Value, grad: Value, lse: Value, delta: Value,
    query_start: Value, tokens: Value, key_head: Value, head_step: Value, length: Value, keys: Value, shift: Value,
    num_keys: Value, window: Value, scale: Value, cap: Value, begin: Value, edge: Value, whole: Value, stop: Value,
    GROUP: constexpr, CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr, MASKED: constexpr,
    COUNT: constexpr, VALUES: constexpr,
) -> Any:  # fmt: skip
    """Add what the queries of ranges give to the gradients of keys and values: of each block, all heads in turn."""
    for index in tl.range(0, GROUP * steps_of(begin, edge, whole, stop, MASKED, COUNT)):
        start = start_of(index // GROUP, begin, edge, whole, MASKED, COUNT)
        head = key_head * GROUP + index % GROUP
        rows = start + tl.arange(0, COUNT)
        places = head * tokens + query_start + rows
        if MASKED:
            # Rows of the next sequence get weights of 0.
            row_lse = tl.load(lse + places, mask=rows < length, other=float("inf"))
            row_delta = tl.load(delta + places, mask=rows < length, other=0.0)
        else:
            row_lse = tl.load(lse + places)
            row_delta = tl.load(delta + places)
        query = q.load([query_start + start, head * head_step])
        pulled = grad.load([query_start + start, head * VALUES])
        slopes = tl.zeros((keys.shape[0], COUNT), tl.float32) - row_delta[None, :]
        slopes = tl.dot(value, pulled.T, slopes)
        scores = tl.dot(key, query.T) * scale
        if CAPPED:
            curved = tanh(scores, FAST)
            slopes *= 1 - curved * curved
            scores = curved * cap
        weights = tl.exp2(scores - row_lse[None, :])
        if MASKED:
            seen = visible((rows + shift)[None, :], keys[:, None], num_keys, window, CAUSAL, WINDOW)
            weights = tl.where(seen, weights, 0.0)
        value_total = tl.dot(weights.to(pulled.dtype), pulled, value_total)
        narrow = (weights * slopes).to(query.dtype)
        key_total = tl.dot(narrow, query, key_total)
    return key_total, value_total


@jit
def _keys_attention_keys(
    q: Value, k: Value, v: Value, grad: Value, lse: Value, delta: Value, key_out: Value, value_out: Value, table: Value,
    scale: Value, cap: Value, slope: Value, window: Value, tokens: Value,
    key_heads: Value, head_step: Value, key_step: Value, value_step: Value,
    GROUP: constexpr, CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr, FEATURES: constexpr,
    VALUES: constexpr, ROWS: constexpr, KEYS: constexpr,
) -> None:  # fmt: skip
    key_head = tl.program_id(0)
    start, length, key_start, num_keys, first = sequence(table, tl.program_id(1))
    keys = first + tl.arange(0, KEYS)
    shift = num_keys - length
    key = k.load([key_start + first, key_head * key_step])
    value = v.load([key_start + first, key_head * value_step])
    key_total = tl.zeros((KEYS, FEATURES), tl.float32)
    value_total = tl.zeros((KEYS, VALUES), tl.float32)
    begin, edge, whole, stop = queries_of(first, length, shift, window, CAUSAL, WINDOW, ROWS, KEYS)
    # A block that reaches into the next sequence is masked as a whole. Its other keys are not stored, but without this
    # line the compiler spills three times as much (Triton 3.6).
    edge = tl.where(first + KEYS > num_keys, stop, edge)
    edge = tl.minimum(tl.maximum(edge, begin), tl.maximum(stop, begin))
    whole = tl.maximum(tl.minimum(whole, length // ROWS * ROWS), edge)
    key_total, value_total = _range(
        key_total, value_total, key, value, q, grad, lse, delta, start, tokens, key_head, head_step, length, keys,
        shift, num_keys, window, scale, cap, begin, edge, whole, stop,
        GROUP, CAUSAL, WINDOW, CAPPED, FAST, False, ROWS, VALUES,
    )  # fmt: skip
    key_total, value_total = _range(
        key_total, value_total, key, value, q, grad, lse, delta, start, tokens, key_head, head_step, length, keys,
        shift, num_keys, window, scale, cap, begin, edge, whole, stop,
        GROUP, CAUSAL, WINDOW, CAPPED, FAST, True, ROWS, VALUES,
    )  # fmt: skip
    within = (keys < num_keys)[:, None]
    row = ((key_start + keys).to(tl.int64) * key_heads + key_head)[:, None]
    features = tl.arange(0, FEATURES)[None, :]
    tl.store(key_out + row * FEATURES + features, (key_total * slope).to(key_out.dtype.element_ty), mask=within)
    values = tl.arange(0, VALUES)[None, :]
    tl.store(value_out + row * VALUES + values, value_total.to(value_out.dtype.element_ty), mask=within)


def serves(q: Tensor, v: Tensor) -> bool:
    """Return whether the kernel serves these heads."""
    return q.shape[-1] in SIZES and v.shape[-1] in SIZES


def run(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    sequences: PackedSequences,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and values.

    Args:
        grad: ``[T, H, Dv]``, the gradient of the output, contiguous.
        q: ``[T, H, D]``; ``k`` and ``v`` are ``[Tk, Hkv, D]`` and ``[Tk, Hkv, Dv]``.
        lse: ``[H, T]``, logarithms of the sums of weights, in units of log 2.
        delta: ``[H, T]``, sums of outputs times their gradients.
        sequences: how the tokens divide into sequences.
        causal, scale, window, softcap: as in :func:`megalight.ops.attention.attention`.
    """
    (tokens, _, dim), (_, key_heads, value_dim), keys = q.shape, v.shape, sequences.keys or sequences
    grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    rows, size = BLOCKS["ROWS"], BLOCKS["KEYS"]
    table = key_blocks(sequences.lengths, keys.lengths, size, causal, window, q.device)
    _keys_attention_keys[(key_heads, len(table))](
        *(_described(q, rows), _described(k, size), _described(v, size), _described(grad, rows), lse, delta),
        *(grad_k, grad_v, table, *factors(scale, softcap), scale, window or 0),
        *(tokens, key_heads, q.stride(1), k.stride(1), v.stride(1)),
        FEATURES=dim, VALUES=value_dim, **flags(q, k, causal, window, softcap), **BLOCKS,
    )  # fmt: skip
    return grad_k, grad_v


def _described(x: Tensor, rows: int) -> Any:
    """Return the descriptor of blocks of ``rows`` tokens of one head, whose heads lie side by side."""
    width = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    flat = x.as_strided((x.shape[0], width), (x.stride(0), 1))
    return Descriptor.from_tensor(flat, [rows, x.shape[2]])
