"""Attention of packed sequences in Triton, with windows, soft caps and sinks, which cuDNN's dense kernel lacks.

The algorithm is FlashAttention-2 (https://arxiv.org/abs/2307.08691). The forward pass keeps the log-sum-exp of each row
of scores, and the backward pass computes the scores again: one kernel for queries, and one for keys and values. Each
program has one block of one sequence. Blocks that see most start first, so that no long one is left at the end. Where a
block sees all of another, no mask is computed.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.imports import require
from megalight.ops.common import apply, once_differentiable
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl
from megalight.types import PackedSequences, to_device

Descriptor: Any = require("triton.tools.tensor_descriptor", "a Triton kernel").TensorDescriptor

LOG2E = math.log2(math.e)

FORWARD: dict[str, Any] = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}
"""Queries of a program, and keys of one of its steps. Two programs share a multiprocessor: one multiplies while another
takes exponentials."""

QUERIES: dict[str, Any] = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}
"""The same for the gradient of queries."""

KEYS: dict[str, Any] = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2}
"""Keys of a program, and queries of one of its steps, for the gradients of keys and values."""

WIDE_FORWARD: dict[str, Any] = {"ROWS": 64, "KEYS": 32, "num_warps": 4, "num_stages": 3}
WIDE_QUERIES: dict[str, Any] = {"ROWS": 64, "KEYS": 32, "num_warps": 4, "num_stages": 2}
WIDE_KEYS: dict[str, Any] = {"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 1}
"""The same for heads of more than ``WIDE`` features. All are the fastest of 5 to 20 on an H200."""

WIDE = 128

DELTA = 64
"""Rows of a program that multiplies outputs and their gradients."""


@jit
def _tanh(x: Value, FAST: constexpr) -> Any:
    if FAST:
        # One instruction, with an error of 2^-11: less than that of a weight in bfloat16.
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505  # a branch of the compiler
        return 1 - 2 / (tl.exp2(2 * 1.4426950408889634 * x) + 1)


@jit
def _visible(places: Value, keys: Value, num_keys: Value, window: Value, CAUSAL: constexpr, WINDOW: constexpr) -> Any:
    """Return which queries see which keys; ``places`` and ``keys`` broadcast to the block."""
    seen = keys < num_keys
    if CAUSAL:
        seen &= places >= keys
    if WINDOW:
        seen &= places - keys <= window
    return seen


@jit
def _sequence(table: Value, starts: Value, key_starts: Value, block: Value) -> Any:
    """Return first token and length of the queries and of the keys of a block's sequence, and its first row."""
    sequence = tl.load(table + 2 * block)
    first = tl.load(table + 2 * block + 1)
    start = tl.load(starts + sequence)
    key_start = tl.load(key_starts + sequence)
    length = tl.load(starts + sequence + 1) - start
    return start, length, key_start, tl.load(key_starts + sequence + 1) - key_start, first


@jit
def _keys_of(
    first: Value, length: Value, num_keys: Value, window: Value,
    CAUSAL: constexpr, WINDOW: constexpr, ROWS: constexpr, COUNT: constexpr,
) -> Any:  # fmt: skip
    """Return the keys that a block of queries sees as three ranges; all rows see all keys of the second."""
    place = first + num_keys - length
    stop = num_keys
    whole = num_keys // COUNT * COUNT
    if CAUSAL:
        stop = tl.minimum(num_keys, place + ROWS)
        whole = tl.minimum(whole, (place + 1) // COUNT * COUNT)
    begin = 0
    edge = 0
    if WINDOW:
        begin = tl.maximum(place - window, 0) // COUNT * COUNT
        edge = tl.cdiv(tl.maximum(place + ROWS - 1 - window, 0), COUNT) * COUNT
    edge = tl.minimum(tl.maximum(edge, begin), stop)
    return begin, edge, tl.maximum(whole, edge), stop


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
            scores = _tanh(scores * scale, FAST) * cap
        else:
            scores *= scale
        if MASKED:
            keys = start + tl.arange(0, COUNT)
            seen = _visible(places[:, None], keys[None, :], num_keys, window, CAUSAL, WINDOW)
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
def _forward(
    q: Value, k: Value, v: Value, out: Value, lse: Value, table: Value, starts: Value, key_starts: Value, sink: Value,
    scale: Value, cap: Value, window: Value, tokens: Value, heads: Value, value_dim: Value,
    GROUP: constexpr, CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, SUNK: constexpr, FAST: constexpr,
    FEATURES: constexpr, VALUES: constexpr, ROWS: constexpr, KEYS: constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(0)
    start, length, key_start, num_keys, first = _sequence(table, starts, key_starts, tl.program_id(1))
    rows = first + tl.arange(0, ROWS)
    places = rows + num_keys - length
    query = q.load([start + first, head, 0]).reshape(ROWS, FEATURES)
    # Finite, so that the difference to a row that has seen nothing yet is not NaN.
    most = tl.full((ROWS,), -1e30, tl.float32)
    sum_ = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, VALUES), tl.float32)
    begin, edge, whole, stop = _keys_of(first, length, num_keys, window, CAUSAL, WINDOW, ROWS, KEYS)
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


@jit
def _delta(
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
    head: Value, places: Value, num_keys: Value, window: Value, scale: Value, cap: Value, begin: Value, stop: Value,
    CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr, MASKED: constexpr,
    COUNT: constexpr, FEATURES: constexpr, VALUES: constexpr,
) -> Any:  # fmt: skip
    """Add what the keys of a range give to the gradient of queries."""
    for start in tl.range(begin, stop, COUNT):
        key = k.load([key_start + start, head, 0]).reshape(COUNT, FEATURES)
        value = v.load([key_start + start, head, 0]).reshape(COUNT, VALUES)
        scores = tl.dot(query, key.T)
        if CAPPED:
            curved = _tanh(scores * scale, FAST)
            scores = curved * cap
        else:
            scores *= scale
        weights = tl.exp2(scores - lse[:, None])
        if MASKED:
            keys = start + tl.arange(0, COUNT)
            seen = _visible(places[:, None], keys[None, :], num_keys, window, CAUSAL, WINDOW)
            weights = tl.where(seen, weights, 0.0)
        slopes = weights * (tl.dot(pulled, value.T) - delta[:, None])
        if CAPPED:
            slopes *= 1 - curved * curved
        total = tl.dot(slopes.to(key.dtype), key, total)
    return total


@jit
def _queries(
    q: Value, k: Value, v: Value, grad: Value, lse: Value, delta: Value, out: Value, table: Value, starts: Value,
    key_starts: Value, scale: Value, cap: Value, slope: Value, window: Value, tokens: Value, heads: Value, dim: Value,
    GROUP: constexpr, CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr,
    FEATURES: constexpr, VALUES: constexpr, ROWS: constexpr, KEYS: constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(0)
    start, length, key_start, num_keys, first = _sequence(table, starts, key_starts, tl.program_id(1))
    rows = first + tl.arange(0, ROWS)
    within = rows < length
    places = rows + num_keys - length
    query = q.load([start + first, head, 0]).reshape(ROWS, FEATURES)
    pulled = grad.load([start + first, head, 0]).reshape(ROWS, VALUES)
    row_lse = tl.load(lse + head * tokens + start + rows, mask=within, other=float("inf"))
    row_delta = tl.load(delta + head * tokens + start + rows, mask=within, other=0.0)
    total = tl.zeros((ROWS, FEATURES), tl.float32)
    begin, edge, whole, stop = _keys_of(first, length, num_keys, window, CAUSAL, WINDOW, ROWS, KEYS)
    if WINDOW:
        total = _query_range(
            total, query, pulled, k, v, row_lse, row_delta, key_start, head // GROUP, places, num_keys, window, scale,
            cap, begin, edge, CAUSAL, WINDOW, CAPPED, FAST, True, KEYS, FEATURES, VALUES,
        )  # fmt: skip
    total = _query_range(
        total, query, pulled, k, v, row_lse, row_delta, key_start, head // GROUP, places, num_keys, window, scale,
        cap, edge, whole, CAUSAL, WINDOW, CAPPED, FAST, False, KEYS, FEATURES, VALUES,
    )  # fmt: skip
    total = _query_range(
        total, query, pulled, k, v, row_lse, row_delta, key_start, head // GROUP, places, num_keys, window, scale,
        cap, whole, stop, CAUSAL, WINDOW, CAPPED, FAST, True, KEYS, FEATURES, VALUES,
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
            curved = _tanh(scores * scale, FAST)
            scores = curved * cap
        else:
            scores *= scale
        weights = tl.exp2(scores - row_lse[:, None])
        if MASKED:
            seen = _visible((rows + shift)[:, None], keys[None, :], num_keys, window, CAUSAL, WINDOW)
            weights = tl.where(seen, weights, 0.0)
        value_total = tl.dot(weights.to(pulled.dtype).T, pulled, value_total)
        slopes = weights * (tl.dot(pulled, value.T) - row_delta[:, None])
        if CAPPED:
            slopes *= 1 - curved * curved
        key_total = tl.dot(slopes.to(query.dtype).T, query, key_total)
    return key_total, value_total


@jit
def _keys(
    q: Value, k: Value, v: Value, grad: Value, lse: Value, delta: Value, key_out: Value, value_out: Value, table: Value,
    starts: Value, key_starts: Value, scale: Value, cap: Value, slope: Value, window: Value, tokens: Value,
    key_heads: Value, dim: Value, value_dim: Value,
    GROUP: constexpr, CAUSAL: constexpr, WINDOW: constexpr, CAPPED: constexpr, FAST: constexpr,
    FEATURES: constexpr, VALUES: constexpr, ROWS: constexpr, KEYS: constexpr,
) -> None:  # fmt: skip
    key_head = tl.program_id(0)
    start, length, key_start, num_keys, first = _sequence(table, starts, key_starts, tl.program_id(1))
    keys = first + tl.arange(0, KEYS)
    shift = num_keys - length
    key = k.load([key_start + first, key_head, 0]).reshape(KEYS, FEATURES)
    value = v.load([key_start + first, key_head, 0]).reshape(KEYS, VALUES)
    key_total = tl.zeros((KEYS, FEATURES), tl.float32)
    value_total = tl.zeros((KEYS, VALUES), tl.float32)
    # Queries from `begin` to `stop` see a key of the block; those from `edge` to `whole` see all of it.
    begin = 0
    edge = 0
    stop = length
    whole = length
    if CAUSAL:
        begin = tl.maximum(first - shift, 0) // ROWS * ROWS
        edge = tl.cdiv(tl.maximum(first + KEYS - 1 - shift, 0), ROWS) * ROWS
    if WINDOW:
        stop = tl.minimum(length, tl.maximum(first + KEYS + window - shift, 0))
        whole = tl.minimum(length, tl.maximum(first + window + 1 - shift, 0) // ROWS * ROWS)
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


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    dropout: float,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of all sequences, in one kernel forward and three backward."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x if _describable(x) else x.contiguous() for x in (q, k, v))
    out: Tensor = apply(_Attention, q, k, v, sink, sequences, (causal, scale, window, softcap))
    return out


class _Attention(torch.autograd.Function):
    """``q [T, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], sink [H] -> [T, H, Dv]``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, sequences: PackedSequences, options: Any
    ) -> Tensor:
        out, lse = _run_forward(q, k, v, sink, sequences, *options)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.sequences, ctx.options = sequences, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        delta = _run_delta(out, grad)
        found = _run_backward(grad, q, k, v, lse, delta, ctx.sequences, *ctx.options)
        grad_sink = None
        if sink is not None and ctx.needs_input_grad[3]:
            # A sink is a key whose value is 0.
            grad_sink = -((sink.float()[:, None] * LOG2E - lse).exp2() * delta).sum(1).to(sink.dtype)
        return (*found, grad_sink, None, None)


def _run_forward(
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
    shape = _shape(FORWARD, WIDE_FORWARD, q, v)
    table = _query_blocks(sequences.lengths, keys.lengths, shape["ROWS"], causal, window, q.device)
    _forward[(heads, len(table))](
        *(_described(q, shape["ROWS"]), _described(k, shape["KEYS"]), _described(v, shape["KEYS"])),
        *(out, lse, table, sequences.cu_seqlens, keys.cu_seqlens, sink, *_factors(scale, softcap), window or 0),
        *(tokens, heads, value_dim),
        SUNK=sink is not None,
        **_flags(q, k, causal, window, softcap),
        **shape,
    )
    return out, lse


def _run_delta(out: Tensor, grad: Tensor) -> Tensor:
    tokens, heads, value_dim = out.shape
    delta = torch.empty(heads, tokens, dtype=torch.float32, device=out.device)
    grid = (heads, cdiv(tokens, DELTA))
    _delta[grid](out, grad, delta, tokens, heads, value_dim, VALUES=next_power(value_dim), ROWS=DELTA, num_warps=4)
    return delta


def _run_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    (tokens, heads, dim), (_, key_heads, value_dim), keys = q.shape, v.shape, sequences.keys or sequences
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    starts = (sequences.cu_seqlens, keys.cu_seqlens, *_factors(scale, softcap), scale, window or 0, tokens)
    flags = _flags(q, k, causal, window, softcap)
    shape = _shape(KEYS, WIDE_KEYS, q, v)
    table = _key_blocks(sequences.lengths, keys.lengths, shape["KEYS"], causal, window, q.device)
    _keys[(key_heads, len(table))](
        *(_described(q, shape["ROWS"]), _described(k, shape["KEYS"]), _described(v, shape["KEYS"])),
        *(_described(grad, shape["ROWS"]), lse, delta, grad_k, grad_v, table, *starts, key_heads, dim, value_dim),
        **flags,
        **shape,
    )
    shape = _shape(QUERIES, WIDE_QUERIES, q, v)
    table = _query_blocks(sequences.lengths, keys.lengths, shape["ROWS"], causal, window, q.device)
    _queries[(heads, len(table))](
        *(_described(q, shape["ROWS"]), _described(k, shape["KEYS"]), _described(v, shape["KEYS"])),
        *(_described(grad, shape["ROWS"]), lse, delta, grad_q, table, *starts, heads, dim),
        **flags,
        **shape,
    )
    return grad_q, grad_k, grad_v


def _describable(x: Tensor) -> bool:
    """Return whether the hardware can load blocks of a view: rows begin at multiples of 16 bytes."""
    bytes_ = [stride * x.element_size() for stride in x.stride()[:-1]]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(size and size % 16 == 0 for size in bytes_)


def _described(x: Tensor, rows: int) -> Any:
    """Return the descriptor of blocks of ``rows`` tokens of one head."""
    return Descriptor.from_tensor(x, [rows, 1, next_power(x.shape[-1])])


def _shape(narrow: dict[str, Any], wide: dict[str, Any], q: Tensor, v: Tensor) -> dict[str, Any]:
    """Return the sizes of blocks for these heads."""
    features, values = next_power(q.shape[-1]), next_power(v.shape[-1])
    return {**(wide if max(features, values) > WIDE else narrow), "FEATURES": features, "VALUES": values}


def _factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the factor of products, and that of capped scores. Scores are in units of log 2."""
    return (scale * LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E)


def _flags(q: Tensor, k: Tensor, causal: bool, window: int | None, softcap: float | None) -> dict[str, Any]:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "CAPPED": softcap is not None,
        "FAST": q.device.type == "cuda",
    }


# Cached by lengths, which are on the host: all layers of a pass share their tables.
@lru_cache(maxsize=64)
def _query_blocks(
    lengths: tuple[int, ...], keys: tuple[int, ...], rows: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """Return sequence and first row of each block of queries, ``[n, 2]`` int32; those that see most come first."""
    blocks = []
    for sequence, (length, count) in enumerate(zip(lengths, keys, strict=True)):
        for first in range(0, length, rows):
            place = first + count - length
            stop = min(count, place + rows) if causal else count
            blocks.append((stop - (0 if window is None else max(0, place - window)), sequence, first))
    return _table(blocks, device)


@lru_cache(maxsize=64)
def _key_blocks(
    lengths: tuple[int, ...], keys: tuple[int, ...], size: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """Return sequence and first key of each block of keys, as above."""
    blocks = []
    for sequence, (length, count) in enumerate(zip(lengths, keys, strict=True)):
        for first in range(0, count, size):
            shift = count - length
            stop = length if window is None else min(length, first + size + window - shift)
            blocks.append((stop - (max(0, first - shift) if causal else 0), sequence, first))
    return _table(blocks, device)


def _table(blocks: list[tuple[int, int, int]], device: torch.device) -> Tensor:
    blocks.sort(key=lambda block: -block[0])
    # Made in inference mode, it could not be used in a backward pass.
    with torch.inference_mode(False):
        return to_device([value for block in blocks for value in block[1:]], torch.int32, device).view(-1, 2)
