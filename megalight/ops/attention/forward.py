"""The forward pass of attention in Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention.blocks import (
    described,
    factors,
    flags,
    keys_of,
    query_blocks,
    sequence,
    shape_of,
    tanh,
    visible,
)
from megalight.ops.jit import Value, constexpr, jit, tl
from megalight.types import PackedSequences

FORWARD: dict[str, Any] = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}
"""Queries of a program, and keys of one of its steps. Two programs share a multiprocessor: one multiplies while another
takes exponentials."""

WIDE_FORWARD: dict[str, Any] = {"ROWS": 64, "KEYS": 32, "num_warps": 4, "num_stages": 3}
"""The same for wide heads. Both are the fastest of 5 to 20 on an H200."""


@jit
def _attend(
    total: Value, sum_: Value, most: Value, q: Value, k: Value, v: Value, key_start: Value, head: Value, places: Value,
    num_keys: Value, window: Value, scale: Value, cap: Value, begin: Value, stop: Value,
    CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr, MASKED: constexpr,
    COUNT: constexpr, FEATURES: constexpr, VALUES: constexpr,
) -> Any:  # fmt: skip
    """Add the keys of a range to the running softmax, whose scores are in units of log 2."""
    for start in tl.range(begin, stop, COUNT):
        key = k.load([key_start + start, head, 0]).reshape(COUNT, FEATURES)
        scores = tl.dot(q, key.T)
        if CAPPED:
            scores = tanh(scores * scale, FAST) * cap
        else:
            scores *= scale
        if MASKED:
            keys = start + tl.arange(0, COUNT)
            seen = visible(places[:, None], keys[None, :], num_keys, window, CAUSAL, WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        more = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - more[:, None])
        shrink = tl.exp2(most - more)
        sum_ = sum_ * shrink + tl.sum(weights, 1)
        total *= shrink[:, None]
        value = v.load([key_start + start, head, 0]).reshape(COUNT, VALUES)
        total = tl.dot(weights.to(value.dtype), value, total)
        most = more
    return total, sum_, most


@jit
def _attention_forward(
    q: Value, k: Value, v: Value, out: Value, lse: Value, table: Value, sink: Value, scale: Value, cap: Value,
    window: Value, tokens: Value, heads: Value, value_dim: Value,
    GROUP: constexpr, CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, SUNK: constexpr, FAST: constexpr,
    FEATURES: constexpr, VALUES: constexpr, ROWS: constexpr, KEYS: constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(0)
    start, length, key_start, num_keys, first = sequence(table, tl.program_id(1))
    rows = first + tl.arange(0, ROWS)
    places = rows + num_keys - length
    query = q.load([start + first, head, 0]).reshape(ROWS, FEATURES)
    # Finite, so that the difference to a row that has seen nothing yet is not NaN.
    most = tl.full((ROWS,), -1e30, tl.float32)
    sum_ = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, VALUES), tl.float32)
    begin, edge, whole, stop = keys_of(first, length, num_keys, window, CAUSAL, WINDOW, ROWS, KEYS)
    if WINDOW:
        total, sum_, most = _attend(
            total, sum_, most, query, k, v, key_start, head // GROUP, places, num_keys, window, scale, cap, begin, edge,
            CAUSAL, WINDOW, CAPPED, FAST, True, KEYS, FEATURES, VALUES,
        )  # fmt: skip
    total, sum_, most = _attend(
        total, sum_, most, query, k, v, key_start, head // GROUP, places, num_keys, window, scale, cap, edge, whole,
        CAUSAL, WINDOW, CAPPED, FAST, False, KEYS, FEATURES, VALUES,
    )  # fmt: skip
    total, sum_, most = _attend(
        total, sum_, most, query, k, v, key_start, head // GROUP, places, num_keys, window, scale, cap, whole, stop,
        CAUSAL, WINDOW, CAPPED, FAST, True, KEYS, FEATURES, VALUES,
    )  # fmt: skip
    if SUNK:
        extra = tl.load(sink + head).to(tl.float32) * 1.4426950408889634
        more = tl.maximum(most, extra)
        shrink = tl.exp2(most - more)
        sum_ = sum_ * shrink + tl.exp2(extra - more)
        total *= shrink[:, None]
        most = more
    total /= sum_[:, None]
    within = rows < length
    tl.store(lse + head * tokens + start + rows, most + tl.log2(sum_), mask=within)
    values = tl.arange(0, VALUES)
    place = ((start + rows).to(tl.int64) * heads + head)[:, None] * value_dim + values[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=within[:, None] & (values < value_dim)[None, :])


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    sequences: PackedSequences,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of each row ``[H, T]`` in units of log 2."""
    (tokens, heads, _), value_dim, keys = q.shape, v.shape[-1], sequences.keys or sequences
    out = q.new_empty(tokens, heads, value_dim)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    shape = shape_of(FORWARD, WIDE_FORWARD, q, v)
    table = query_blocks(sequences.lengths, keys.lengths, shape["ROWS"], causal, window, q.device)
    _attention_forward[(heads, len(table))](
        *(described(q, shape["ROWS"]), described(k, shape["KEYS"]), described(v, shape["KEYS"])),
        *(out, lse, table, sink, *factors(scale, softcap), window or 0),
        *(tokens, heads, value_dim),
        SUNK=sink is not None,
        **flags(q, k, causal, window, softcap),
        **shape,
    )
    return out, lse
