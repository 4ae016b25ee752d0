"""Attention of packed sequences in Triton, with windows, soft caps and sinks, which cuDNN's dense kernel lacks.

The algorithm is FlashAttention-2 (https://arxiv.org/abs/2307.08691). The forward pass keeps the log-sum-exp of each row
of scores, and the backward pass computes the scores again. Each program has one block of one sequence. Blocks that see
most start first, so that no long one is left at the end. Where a block sees all of another, no mask is computed.

Heads of 128 features have kernels of their own on Hopper (:mod:`megalight.ops.attention.hopper`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from megalight.ops.attention import hopper, triton_backward
from megalight.ops.attention.triton_blocks import (
    LOG2E,
    describable,
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
from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.jit import Value, constexpr, jit, tl
from megalight.types import PackedSequences

FORWARD: dict[str, Any] = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}
"""Queries of a program, and keys of one of its steps. Two programs share an SM: one multiplies while another
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


def launch_forward(
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
        *(out, lse, table, sink, *factors(scale, softcap), window or 0), *(tokens, heads, value_dim),
        SUNK=sink is not None, **flags(q, k, causal, window, softcap), **shape,
    )  # fmt: skip
    return out, lse


Options: TypeAlias = tuple[bool, float, int | None, float | None]
"""Whether a query sees no later key, the factor on scores, the window, and the soft cap."""


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
    q, k, v = (x if describable(x) else x.contiguous() for x in (q, k, v))
    out: Tensor = apply(_TritonAttention, q, k, v, sink, sequences, (causal, scale, window, softcap))
    return out


class _TritonAttention(torch.autograd.Function):
    """``q [T, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], sink [H] -> [T, H, Dv]``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, sequences: PackedSequences, options: Options
    ) -> Tensor:
        out, lse = run_forward(q, k, v, sink, sequences, options)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.sequences, ctx.options = sequences, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        *found, delta = run_backward(grad.contiguous(), q, k, v, out, lse, ctx.sequences, ctx.options)
        grad_sink = None
        if sink is not None and ctx.needs_input_grad[3]:
            # A sink is a key whose value is 0.
            grad_sink = -((sink.float()[:, None] * LOG2E - lse).exp2() * delta).sum(1).to(sink.dtype)
        return (*found, grad_sink, None, None)


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, sequences: PackedSequences, options: Options
) -> tuple[Tensor, Tensor]:
    """Return the output ``[T, H, Dv]``, and the log-sum-exp of each row ``[H, T]`` in units of log 2.

    Args:
        q: ``[T, H, D]``. Queries, keys and values are :func:`megalight.ops.attention.triton_blocks.describable`.
        k: ``[Tk, Hkv, D]``.
        v: ``[Tk, Hkv, Dv]``.
        sink: ``[H]``, or None.
        sequences: how tokens divide into sequences.
        options: whether a query sees no later key, the factor on scores, the window, and the soft cap.
    """
    causal, _, window, _ = options
    run = hopper.run_forward if hopper.serves(q, v, sequences, causal, window) else launch_forward
    found: tuple[Tensor, Tensor] = run(q, k, v, sink, sequences, *options)
    return found


def run_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: PackedSequences,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, and the sums of outputs times their gradients ``[H, T]``.

    Arguments are as in :func:`run_forward`, and the output, its log-sum-exp and its gradient, which are contiguous.
    """
    causal, _, window, _ = options
    if hopper.serves_backward(q, v, sequences, causal, window):
        found: tuple[Tensor, Tensor, Tensor, Tensor] = hopper.run_backward(grad, q, k, v, out, lse, sequences, *options)
        return found
    delta = triton_backward.run_delta(out, grad)
    args = (grad, q, k, v, lse, delta, sequences, *options)
    of_keys = triton_backward.run if triton_backward.serves(q, v) else triton_backward.of_keys
    return triton_backward.of_queries(*args), *of_keys(*args), delta
