"""The gradients of keys and values, for heads of 64 and 128 features.

Scores lie as keys times queries, so that what comes of them is a left factor in registers as it is, and blocks are
loaded from matrices of two dimensions. Queries that see all keys of a block are in a loop without a mask, and all the
others in a second one. Both go over all heads of a group, as each loop begins with loads that nothing hides: with loops
for each head and each edge there were twelve for four heads. Almost nothing spills, and two programs share a
multiprocessor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention.blocks import (
    Descriptor,
    factors,
    flags,
    key_blocks,
    queries_of,
    sequence,
    start_of,
    steps_of,
    tanh,
    visible,
)
from megalight.ops.jit import Value, constexpr, jit, tl
from megalight.types import PackedSequences

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
def _attention_keys(
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
    _attention_keys[(key_heads, len(table))](
        *(_described(q, rows), _described(k, size), _described(v, size), _described(grad, rows), lse, delta),
        *(grad_k, grad_v, table, *factors(scale, softcap), scale, window or 0),
        *(tokens, key_heads, q.stride(1), k.stride(1), v.stride(1)),
        FEATURES=dim,
        VALUES=value_dim,
        **flags(q, k, causal, window, softcap),
        **BLOCKS,
    )
    return grad_k, grad_v


def _described(x: Tensor, rows: int) -> Any:
    """Return the descriptor of blocks of ``rows`` tokens of one head, whose heads lie side by side."""
    width = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    flat = x.as_strided((x.shape[0], width), (x.stride(0), 1))
    return Descriptor.from_tensor(flat, [rows, x.shape[2]])
