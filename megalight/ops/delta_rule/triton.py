"""The gated delta rule in chunks: kernels for what tokens write, for the states of chunks, for outputs and gradients.

Notation, for a head and a chunk with the state ``S`` before it: ``total`` is the logarithm of the decay from the
chunk's beginning to a token, the token's own included. ``L[i, j]`` is the decay from token ``j`` to token ``i``, 0 for
later tokens and other sequences. ``reach`` is the decay with which a token reads ``S``, 0 if its sequence begins in the
chunk; ``to_end`` that with which it adds to the state after the chunk, 0 if its sequence ends before. With
``A = beta (k k^T) L`` below the diagonal and ``M = (I + A)^-1``, the chunk's tokens write ``u = M x`` with
``x = beta (v - reach k S)`` (the WY form, section 3.3 of https://arxiv.org/abs/2412.06464), which is
``fresh - erased S`` with ``fresh = M beta v`` and ``erased = M beta reach k``. They give
``y = ((q k^T) L) u + reach q S``.

Every exponent is a difference that is at most 0. Matrices that are kept between kernels have the inputs' dtype, and
sums are float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.common import last_contiguous
from megalight.ops.jit import OVERLAP, Value, cdiv, constexpr, jit, next_power, start_dependents, tl, triton
from megalight.types import PackedSequences, Pages

FEATURES = 32
"""Features of a value of a program of a decode step: a text of many heads must fill a GPU alone."""


@jit
def load_rows(pointer: Value, stride: Value, token: Value, tokens: Value, width: Value, BLOCK: constexpr) -> Value:
    """Load ``[ROWS, BLOCK]`` of consecutive features; 0 outside of ``tokens`` and ``width``."""
    feature = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (feature < width)[None, :]
    return tl.load(pointer + token.to(tl.int64)[:, None] * stride + feature[None, :], mask=inside, other=0.0)


@jit
def decays(total_i: Value, total_j: Value, start_i: Value, start_j: Value, i: Value, j: Value) -> Value:
    """Return the decay from token ``j`` to token ``i``, ``[i, j]``; 0 for later tokens and other sequences."""
    seen = (i[:, None] >= j[None, :]) & (start_i[:, None] == start_j[None, :])
    # Masked before the exponential: the difference of later tokens is positive, and may overflow.
    return tl.exp(tl.where(seen, total_i[:, None] - total_j[None, :], float("-inf")))


CHUNK = 64
"""Tokens per chunk, a power of two."""
NARROWEST = 64
"""Features that smaller heads are padded to."""
PART = 64
"""Features of values that a program multiplies at once, where it has others in its registers."""
VALUES = 32
"""Features of values whose states a program passes from chunk to chunk."""


@jit
def _reach(total: Value, start: Value, first: Value) -> Value:
    return tl.exp(tl.where(start < first, total, float("-inf")))


@jit
def _to_end(totals: Value, starts: Value, total: Value, start: Value, last: Value, heads: Value, head: Value) -> Value:
    """``last``: the chunk's last token."""
    end = tl.load(totals + last * heads + head)
    return tl.exp(tl.where(start == tl.load(starts + last), end - total, float("-inf")))


@jit
def _solve(
    k: Value, beta: Value, totals: Value, starts: Value, out: Value, tokens: Value, heads: Value, per: Value,
    k_token: Value, k_group: Value,
    CHUNK: constexpr, LEVELS: constexpr, WIDTH: constexpr,
) -> None:  # fmt: skip
    """Write ``M``, ``[CHUNK, CHUNK]`` of a chunk and a head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, CHUNK)
    i = chunk * CHUNK + row
    key = load_rows(k + head // per * k_group, k_token, i, tokens, WIDTH, WIDTH)
    total, start = tl.load(totals + i * heads + head), tl.load(starts + i)
    rate = tl.load(beta + i * heads + head)
    overlap = tl.dot(key, tl.trans(key), input_precision="ieee") * decays(total, total, start, start, i, i)
    overlap *= rate[:, None]
    high, low = row[:, None], row[None, :]
    # The inverse of [[P, 0], [Q, R]] is [[P', 0], [-R' Q P', R']], for blocks of 1, 2, 4, ...
    inverse = tl.where(high == low, 1.0, 0.0) - tl.where((high - low == 1) & (high % 2 == 1), overlap, 0.0)
    for level in tl.static_range(1, LEVELS):
        paired = ((high >> level) - (low >> level) == 1) & ((high >> level) % 2 == 1)
        below = tl.where(paired, overlap, 0.0)
        below = tl.dot(below, inverse, input_precision="tf32")
        inverse -= tl.dot(inverse, below, input_precision="tf32")
    target = out + (i.to(tl.int64) * heads + head)[:, None] * CHUNK + low
    tl.store(target, inverse.to(out.dtype.element_ty))


@jit
def _inverse(inverses: Value, i: Value, heads: Value, head: Value, CHUNK: constexpr) -> Value:
    return tl.load(inverses + (i.to(tl.int64) * heads + head)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :])


@jit
def _write(
    k: Value, v: Value, beta: Value, totals: Value, starts: Value, inverses: Value, fresh: Value, erased: Value,
    tokens: Value, heads: Value, per: Value, k_token: Value, k_group: Value, v_token: Value, v_head: Value,
    CHUNK: constexpr, WIDTH: constexpr, SIZE: constexpr,
) -> None:  # fmt: skip
    """Write ``fresh`` and ``erased`` of a chunk and a head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first = chunk * CHUNK
    i = first + tl.arange(0, CHUNK)
    total, start = tl.load(totals + i * heads + head), tl.load(starts + i)
    rate = tl.load(beta + i * heads + head)
    inverse = _inverse(inverses, i, heads, head, CHUNK)
    every = (i.to(tl.int64) * heads + head)[:, None]
    value = load_rows(v + head * v_head, v_token, i, tokens, SIZE, SIZE)
    value = (value.to(tl.float32) * rate[:, None]).to(inverse.dtype)
    found = tl.dot(inverse, value, input_precision="ieee")
    feature = tl.arange(0, SIZE)[None, :]
    tl.store(fresh + every * SIZE + feature, found.to(fresh.dtype.element_ty))
    key = load_rows(k + head // per * k_group, k_token, i, tokens, WIDTH, WIDTH)
    key = (key.to(tl.float32) * (rate * _reach(total, start, first))[:, None]).to(inverse.dtype)
    found = tl.dot(inverse, key, input_precision="ieee")
    feature = tl.arange(0, WIDTH)[None, :]
    tl.store(erased + every * WIDTH + feature, found.to(erased.dtype.element_ty))


# Where `chunks` is known to be 1, Triton 3.6 drops the loop, and the state after it is wrong on an H200.
@triton.jit(do_not_specialize=["chunks"])  # type: ignore[untyped-decorator]
def _pass(
    k: Value, written: Value, erased: Value, totals: Value, starts: Value, kept: Value, states: Value, entries: Value,
    before: Value, after: Value, chunks: Value, tokens: Value, heads: Value, per: Value, k_token: Value, k_group: Value,
    ENTER: constexpr, CHUNK: constexpr, WIDTH: constexpr, SIZE: constexpr, VALUES: constexpr,
) -> None:  # fmt: skip
    """Turn ``fresh`` into ``u`` in place, and write the states before the chunks, for some features of a head.

    With ``ENTER``, chunk ``c`` begins with the state ``before[entries[2 c]]``, and the state after it is written to
    ``after[entries[2 c + 1]]``; nothing happens for negative numbers.
    """
    head = tl.program_id(0)
    feature = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    column = tl.arange(0, WIDTH)
    place = column[:, None] * SIZE + feature[None, :]
    step = tl.arange(0, CHUNK)
    state = tl.zeros((WIDTH, VALUES), tl.float32)
    for chunk in range(chunks):
        first = chunk * CHUNK
        i = first + step
        matrix_of = (tl.cast(chunk, tl.int64) * heads + head) * WIDTH * SIZE
        if ENTER:
            number = tl.load(entries + 2 * chunk).to(tl.int64)
            entering = before + (number * heads + head) * WIDTH * SIZE + place
            state = tl.where(number >= 0, tl.load(entering, mask=number >= 0, other=0.0), state)
        narrow = state.to(states.dtype.element_ty)
        tl.store(states + matrix_of + place, narrow)
        total, start = tl.load(totals + i * heads + head), tl.load(starts + i)
        every = (i.to(tl.int64) * heads + head)[:, None]
        gone = tl.load(erased + every * WIDTH + column[None, :])
        target = written + every * SIZE + feature[None, :]
        fresh = tl.load(target).to(tl.float32)
        key = load_rows(k + head // per * k_group, k_token, i, tokens, WIDTH, WIDTH)
        found = fresh - tl.dot(gone, narrow, input_precision="ieee")
        tl.store(target, found.to(written.dtype.element_ty))
        decayed = found * _to_end(totals, starts, total, start, first + CHUNK - 1, heads, head)[:, None]
        state *= tl.load(kept + chunk * heads + head)
        state = tl.dot(tl.trans(key), decayed.to(key.dtype), state, input_precision="ieee")
        if ENTER:
            number = tl.load(entries + 2 * chunk + 1).to(tl.int64)
            tl.store(after + (number * heads + head) * WIDTH * SIZE + place, state, mask=number >= 0)


@jit
def _outputs(
    q: Value, k: Value, written: Value, totals: Value, starts: Value, states: Value, y: Value, tokens: Value,
    heads: Value, per: Value, q_token: Value, q_group: Value, k_token: Value, k_group: Value,
    CHUNK: constexpr, WIDTH: constexpr, SIZE: constexpr,
) -> None:  # fmt: skip
    """Write ``y`` of a chunk and a head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first = chunk * CHUNK
    i = first + tl.arange(0, CHUNK)
    total, start = tl.load(totals + i * heads + head), tl.load(starts + i)
    query = load_rows(q + head // per * q_group, q_token, i, tokens, WIDTH, WIDTH)
    key = load_rows(k + head // per * k_group, k_token, i, tokens, WIDTH, WIDTH)
    square = tl.arange(0, WIDTH)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    state = tl.load(states + (chunk.to(tl.int64) * heads + head) * WIDTH * SIZE + square)
    out = tl.dot(query, state, input_precision="ieee") * _reach(total, start, first)[:, None]
    pairs = tl.dot(query, tl.trans(key), input_precision="ieee") * decays(total, total, start, start, i, i)
    value = load_rows(written + head * SIZE, heads * SIZE, i, tokens, SIZE, SIZE)
    out = tl.dot(pairs.to(value.dtype), value, out, input_precision="ieee")
    feature = tl.arange(0, SIZE)[None, :]
    target = y + (i.to(tl.int64) * heads + head)[:, None] * SIZE + feature
    tl.store(target, out.to(y.dtype.element_ty), mask=(i < tokens)[:, None])


@jit
def _grad_outputs(
    q: Value, k: Value, grad_y: Value, totals: Value, starts: Value, grad_written: Value, tokens: Value, heads: Value,
    per: Value, q_token: Value, q_group: Value, k_token: Value, k_group: Value,
    CHUNK: constexpr, WIDTH: constexpr, SIZE: constexpr,
) -> None:  # fmt: skip
    """Write what ``y`` of a chunk gives to the gradient of ``u`` of the same chunk."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    total, start = tl.load(totals + i * heads + head), tl.load(starts + i)
    query = load_rows(q + head // per * q_group, q_token, i, tokens, WIDTH, WIDTH)
    key = load_rows(k + head // per * k_group, k_token, i, tokens, WIDTH, WIDTH)
    grad = load_rows(grad_y + head * SIZE, heads * SIZE, i, tokens, SIZE, SIZE)
    seen = (i[None, :] >= i[:, None]) & (start[None, :] == start[:, None])
    decay = tl.exp(tl.where(seen, total[None, :] - total[:, None], float("-inf")))
    pairs = tl.dot(key, tl.trans(query), input_precision="ieee") * decay
    out = tl.dot(pairs.to(grad.dtype), grad, input_precision="ieee")
    feature = tl.arange(0, SIZE)[None, :]
    target = grad_written + (i.to(tl.int64) * heads + head)[:, None] * SIZE + feature
    tl.store(target, out.to(grad_written.dtype.element_ty))


@jit
def _pass_back(
    q: Value, k: Value, grad_y: Value, written: Value, erased: Value, grad_written: Value, totals: Value, starts: Value,
    kept: Value, states: Value, grad_states: Value, leaving: Value, through: Value, chunks: Value, tokens: Value,
    heads: Value, per: Value, q_token: Value, q_group: Value, k_token: Value, k_group: Value,
    CHUNK: constexpr, WIDTH: constexpr, SIZE: constexpr, VALUES: constexpr,
) -> None:  # fmt: skip
    """Complete the gradient of ``u`` in place, and write those of the states after the chunks, from the last chunk.

    ``leaving`` and ``through`` get the features' shares of the gradients of the logarithms of ``to_end`` and ``kept``.
    """
    head = tl.program_id(0)
    feature = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    column = tl.arange(0, WIDTH)
    place = column[:, None] * SIZE + feature[None, :]
    step = tl.arange(0, CHUNK)
    state = tl.zeros((WIDTH, VALUES), tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        first = chunk * CHUNK
        i = first + step
        narrow = state.to(grad_states.dtype.element_ty)
        matrix_of = (tl.cast(chunk, tl.int64) * heads + head) * WIDTH * SIZE
        tl.store(grad_states + matrix_of + place, narrow)
        total, start = tl.load(totals + i * heads + head), tl.load(starts + i)
        every = (i.to(tl.int64) * heads + head)[:, None]
        key = load_rows(k + head // per * k_group, k_token, i, tokens, WIDTH, WIDTH)
        query = load_rows(q + head // per * q_group, q_token, i, tokens, WIDTH, WIDTH)
        gone = tl.load(erased + every * WIDTH + column[None, :])
        target = grad_written + every * SIZE + feature[None, :]
        given = tl.load(target).to(tl.float32)
        seen = (i < tokens)[:, None]
        grad = tl.load(grad_y + every * SIZE + feature[None, :], mask=seen, other=0.0).to(tl.float32)
        to_end = _to_end(totals, starts, total, start, first + CHUNK - 1, heads, head)
        later = tl.dot(key, narrow, input_precision="ieee") * to_end[:, None]
        value = tl.load(written + every * SIZE + feature[None, :])
        plane = (tl.program_id(1) * chunks).to(tl.int64) * CHUNK + i
        tl.store(leaving + plane * heads + head, tl.sum(later * value.to(tl.float32), 1))
        factor = tl.load(kept + chunk * heads + head)
        before = tl.load(states + matrix_of + place)
        share = factor * tl.sum(tl.sum(before.to(tl.float32) * state, 1), 0)
        tl.store(through + (tl.program_id(1) * chunks + chunk) * heads + head, share)
        given += later
        given = given.to(grad_written.dtype.element_ty)
        tl.store(target, given)
        grad = (grad * _reach(total, start, first)[:, None]).to(query.dtype)
        state *= factor
        state = tl.dot(tl.trans(query), grad, state, input_precision="ieee")
        state -= tl.dot(tl.trans(gone), given, input_precision="ieee")


@jit
def _grad_values(
    q: Value, k: Value, v: Value, beta: Value, grad_y: Value, totals: Value, starts: Value, inverses: Value,
    states: Value, grad_written: Value, grad_v: Value, grad_beta: Value, grad_total: Value, tokens: Value, heads: Value,
    per: Value, q_token: Value, q_group: Value, k_token: Value, k_group: Value, v_token: Value, v_head: Value,
    CHUNK: constexpr, WIDTH: constexpr, SIZE: constexpr,
) -> None:  # fmt: skip
    """Turn the gradient of ``u`` into that of ``x`` in place, and write what comes of it alone.

    ``grad_total`` gets what comes through ``reach``.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    first = chunk * CHUNK
    i = first + tl.arange(0, CHUNK)
    one = i * heads + head
    total, start, rate = tl.load(totals + one), tl.load(starts + i), tl.load(beta + one)
    feature = tl.arange(0, SIZE)[None, :]
    every = (i.to(tl.int64) * heads + head)[:, None] * SIZE + feature
    inverse = _inverse(inverses, i, heads, head, CHUNK)
    given = tl.load(grad_written + every)
    grad = tl.dot(tl.trans(inverse), given, input_precision="ieee")
    tl.store(grad_written + every, grad.to(grad_written.dtype.element_ty))
    seen = (i < tokens)[:, None]
    tl.store(grad_v + every, (grad * rate[:, None]).to(grad_v.dtype.element_ty), mask=seen)
    key = load_rows(k + head // per * k_group, k_token, i, tokens, WIDTH, WIDTH)
    square = tl.arange(0, WIDTH)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    state = tl.load(states + (chunk.to(tl.int64) * heads + head) * WIDTH * SIZE + square)
    reach = _reach(total, start, first)[:, None]
    known = tl.dot(key, state, input_precision="ieee") * reach
    value = load_rows(v + head * v_head, v_token, i, tokens, SIZE, SIZE).to(tl.float32)
    tl.store(grad_beta + one, tl.sum(grad * (value - known), 1))
    lost = rate * tl.sum(grad * known, 1)
    query = load_rows(q + head // per * q_group, q_token, i, tokens, WIDTH, WIDTH)
    read = tl.dot(query, state, input_precision="ieee") * reach
    read *= load_rows(grad_y + head * SIZE, heads * SIZE, i, tokens, SIZE, SIZE).to(tl.float32)
    tl.store(grad_total + one, tl.sum(read, 1) - lost)


@jit
def _grad_queries(
    k: Value, written: Value, grad_y: Value, totals: Value, starts: Value, states: Value, grad_q: Value,
    tokens: Value, heads: Value, per: Value, k_token: Value, k_group: Value,
    CHUNK: constexpr, WIDTH: constexpr, SIZE: constexpr, PART: constexpr,
) -> None:  # fmt: skip
    """Write the gradient of ``q``, summed over the heads of a group."""
    chunk, group = tl.program_id(0), tl.program_id(1)
    first = chunk * CHUNK
    i = first + tl.arange(0, CHUNK)
    start = tl.load(starts + i)
    column = tl.arange(0, WIDTH)
    place = column[:, None] * SIZE
    out = tl.zeros((CHUNK, WIDTH), tl.float32)
    for head in range(group * per, group * per + per):
        total = tl.load(totals + i * heads + head)
        reach = _reach(total, start, first)[:, None]
        every = (i.to(tl.int64) * heads + head)[:, None] * SIZE
        matrix_of = states + (chunk.to(tl.int64) * heads + head) * WIDTH * SIZE
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        for begin in range(0, SIZE, PART):
            feature = begin + tl.arange(0, PART)
            inside = (i < tokens)[:, None]
            grad = tl.load(grad_y + every + feature[None, :], mask=inside, other=0.0)
            value = tl.load(written + every + feature[None, :])
            state = tl.load(matrix_of + place + feature[None, :])
            pairs = tl.dot(grad, tl.trans(value), pairs, input_precision="ieee")
            read = (grad.to(tl.float32) * reach).to(grad.dtype)
            out = tl.dot(read, tl.trans(state), out, input_precision="ieee")
        pairs *= decays(total, total, start, start, i, i)
        key = load_rows(k + group * k_group, k_token, i, tokens, WIDTH, WIDTH)
        out = tl.dot(pairs.to(key.dtype), key, out, input_precision="ieee")
    target = grad_q + (i.to(tl.int64) * (heads // per) + group)[:, None] * WIDTH + column[None, :]
    tl.store(target, out.to(grad_q.dtype.element_ty), mask=(i < tokens)[:, None])


@jit
def _grad_keys(
    q: Value, k: Value, beta: Value, written: Value, grad_inputs: Value, grad_y: Value, totals: Value, starts: Value,
    states: Value, grad_states: Value, grad_k: Value, grad_beta: Value, grad_total: Value, tokens: Value, heads: Value,
    per: Value, q_token: Value, q_group: Value, k_token: Value, k_group: Value,
    CHUNK: constexpr, WIDTH: constexpr, SIZE: constexpr, PART: constexpr,
) -> None:  # fmt: skip
    """Write the gradient of ``k``, summed over the heads of a group, and add what pairs give to the other gradients."""
    chunk, group = tl.program_id(0), tl.program_id(1)
    first = chunk * CHUNK
    i = first + tl.arange(0, CHUNK)
    start = tl.load(starts + i)
    column = tl.arange(0, WIDTH)
    place = column[:, None] * SIZE
    out = tl.zeros((CHUNK, WIDTH), tl.float32)
    for head in range(group * per, group * per + per):
        one = i * heads + head
        total, rate = tl.load(totals + one), tl.load(beta + one)
        to_end = _to_end(totals, starts, total, start, first + CHUNK - 1, heads, head)[:, None]
        reach = (-rate * _reach(total, start, first))[:, None]
        every = (i.to(tl.int64) * heads + head)[:, None] * SIZE
        matrix_of = (chunk.to(tl.int64) * heads + head) * WIDTH * SIZE
        given = tl.zeros((CHUNK, CHUNK), tl.float32)
        inner = tl.zeros((CHUNK, CHUNK), tl.float32)
        for begin in range(0, SIZE, PART):
            feature = begin + tl.arange(0, PART)
            inside = (i < tokens)[:, None]
            grad = tl.load(grad_y + every + feature[None, :], mask=inside, other=0.0)
            value = tl.load(written + every + feature[None, :])
            grad_input = tl.load(grad_inputs + every + feature[None, :])
            given = tl.dot(grad, tl.trans(value), given, input_precision="ieee")
            inner = tl.dot(grad_input, tl.trans(value), inner, input_precision="ieee")
            # through the state after the chunk, and through what is read of that before it
            state = tl.load(grad_states + matrix_of + place + feature[None, :])
            added = (value.to(tl.float32) * to_end).to(value.dtype)
            out = tl.dot(added, tl.trans(state), out, input_precision="ieee")
            state = tl.load(states + matrix_of + place + feature[None, :])
            lost = (grad_input.to(tl.float32) * reach).to(value.dtype)
            out = tl.dot(lost, tl.trans(state), out, input_precision="ieee")
        query = load_rows(q + group * q_group, q_token, i, tokens, WIDTH, WIDTH)
        key = load_rows(k + group * k_group, k_token, i, tokens, WIDTH, WIDTH)
        # through the pairs of outputs
        decay = decays(total, total, start, start, i, i)
        given *= decay
        both = given * tl.dot(query, tl.trans(key), input_precision="ieee")
        out = tl.dot(tl.trans(given.to(query.dtype)), query, out, input_precision="ieee")
        # through those of what is written
        inner *= -tl.where(i[:, None] > i[None, :], decay, 0.0)
        overlap = inner * tl.dot(key, tl.trans(key), input_precision="ieee")
        tl.store(grad_beta + one, tl.load(grad_beta + one) + tl.sum(overlap, 1))
        both += overlap * rate[:, None]
        inner *= rate[:, None]
        symmetric = (inner + tl.trans(inner)).to(key.dtype)
        out = tl.dot(symmetric, key, out, input_precision="ieee")
        # Both sums are of the same numbers, so that what is in both cancels.
        tl.store(grad_total + one, tl.load(grad_total + one) + tl.sum(both, 1) - tl.sum(both, 0))
    target = grad_k + (i.to(tl.int64) * (heads // per) + group)[:, None] * WIDTH + column[None, :]
    tl.store(target, out.to(grad_k.dtype.element_ty), mask=(i < tokens)[:, None])


class _Chunks:
    """What all kernels of a call share: sizes, and rates and decays of the tokens in chunks."""

    def __init__(self, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor) -> None:
        self.tokens, self.heads, self.size = v.shape
        self.groups, self.width = k.shape[1:]
        self.count = cdiv(self.tokens, CHUNK)
        self.rows = self.count * CHUNK
        missing = self.rows - self.tokens
        # Padding has rates of 0 and continues the last sequence: it leaves the state as it is.
        self.beta, falls = (F.pad(t.float(), (0, 0, 0, missing)).contiguous() for t in (beta, decay))
        self.starts = torch.cat([starts, starts[-1:].expand(missing)]).int()
        totals = falls.view(self.count, CHUNK, -1).cumsum(1)
        self.totals = totals.view(self.rows, -1)
        crosses = self.starts.view(self.count, CHUNK)[:, -1] < torch.arange(self.count, device=v.device) * CHUNK
        self.kept = (totals[:, -1].exp() * crosses[:, None]).contiguous()
        self.like = v
        self.values = min(VALUES, self.size)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, heads, and heads per group."""
        return self.tokens, self.heads, self.heads // self.groups

    @property
    def blocks(self) -> dict[str, Any]:
        return {"CHUNK": CHUNK, "WIDTH": self.width, "SIZE": self.size, "num_warps": 4}

    @property
    def parts(self) -> dict[str, Any]:
        """Blocks of kernels that go through the features of values."""
        part = min(PART, self.size)
        return {"CHUNK": CHUNK, "WIDTH": self.width, "SIZE": self.size, "PART": part, "num_warps": 4, "num_stages": 2}

    @property
    def strips(self) -> tuple[tuple[int, int], dict[str, Any]]:
        """Programs and blocks of kernels that pass states on."""
        grid = (self.heads, cdiv(self.size, self.values))
        return grid, {"CHUNK": CHUNK, "WIDTH": self.width, "SIZE": self.size, "VALUES": self.values, "num_warps": 4}

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.like.dtype, device=self.like.device)

    def inverses(self, k: Tensor) -> Tensor:
        """Return ``M``, ``[rows, H, CHUNK]``."""
        out = self.new(self.rows, self.heads, CHUNK)
        _solve[(self.count, self.heads)](
            *(k, self.beta, self.totals, self.starts, out, *self.sizes, *k.stride()[:2]),
            CHUNK=CHUNK, LEVELS=CHUNK.bit_length() - 1, WIDTH=self.width, num_warps=4,
        )  # fmt: skip
        return out

    def written(
        self, k: Tensor, v: Tensor, inverses: Tensor, enter: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``u [rows, H, V]``, ``erased [rows, H, K]`` and the states before the chunks ``[chunks, H, K, V]``."""
        written, erased = self.new(self.rows, self.heads, self.size), self.new(self.rows, self.heads, self.width)
        states = self.new(self.count, self.heads, self.width, self.size)
        shared = (self.totals, self.starts)
        _write[(self.count, self.heads)](
            *(k, v, self.beta, *shared, inverses, written, erased, *self.sizes, *k.stride()[:2], *v.stride()[:2]),
            **self.blocks,
        )
        grid, blocks = self.strips
        entries, before, after = enter or (None, None, None)
        _pass[grid](
            *(k, written, erased, *shared, self.kept, states, entries, before, after, self.count, *self.sizes),
            *k.stride()[:2],
            ENTER=enter is not None,
            **blocks,
        )
        return written, erased, states

    def outputs(self, q: Tensor, k: Tensor, written: Tensor, states: Tensor) -> Tensor:
        """Return ``y [T, H, V]``."""
        y = self.new(self.tokens, self.heads, self.size)
        _outputs[(self.count, self.heads)](
            *(q, k, written, self.totals, self.starts, states, y, *self.sizes, *q.stride()[:2], *k.stride()[:2]),
            **self.blocks,
        )
        return y


def _prepared(*tensors: Tensor) -> list[Tensor]:
    """Return tensors whose heads have ``NARROWEST`` features or a larger power of two, and begin at 16 bytes."""
    found = []
    for rows in tensors:
        missing = max(NARROWEST, next_power(rows.shape[-1])) - rows.shape[-1]
        rows = F.pad(rows, (0, missing)) if missing else rows
        aligned = rows.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in rows.stride()[:-1])
        found.append(rows if aligned and rows.stride(-1) == 1 else rows.contiguous())
    return found


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, positions: Tensor) -> Tensor:
        chunks = _Chunks(k, v, decay, beta, torch.arange(len(v), device=v.device) - positions)
        inverses = chunks.inverses(k)
        written, _, states = chunks.written(k, v, inverses)
        # The rest is computed again in backward: states are as large as the inputs of several layers.
        ctx.save_for_backward(q, k, v, decay, beta, positions, inverses)
        return chunks.outputs(q, k, written, states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, beta, positions, inverses = ctx.saved_tensors
        grad_y = grad_y.contiguous()
        chunks = _Chunks(k, v, decay, beta, torch.arange(len(v), device=v.device) - positions)
        written, erased, states = chunks.written(k, v, inverses)
        shared, both = (chunks.totals, chunks.starts), (*q.stride()[:2], *k.stride()[:2])
        grad_written, grad_states = torch.empty_like(written), torch.empty_like(states)
        by_head, by_group = (chunks.count, chunks.heads), (chunks.count, chunks.groups)
        _grad_outputs[by_head](q, k, grad_y, *shared, grad_written, *chunks.sizes, *both, **chunks.blocks)
        grid, blocks = chunks.strips
        leaving = chunks.totals.new_empty(grid[1], *chunks.totals.shape)
        through = chunks.totals.new_empty(grid[1], chunks.count, chunks.heads)
        _pass_back[grid](
            *(q, k, grad_y, written, erased, grad_written, *shared, chunks.kept, states, grad_states, leaving, through),
            *(chunks.count, *chunks.sizes, *both),
            **blocks,
        )
        grad_q, grad_k, grad_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        grad_beta, grad_total = (torch.empty_like(chunks.totals) for _ in range(2))
        _grad_values[by_head](
            *(q, k, v, chunks.beta, grad_y, *shared, inverses, states, grad_written, grad_v, grad_beta, grad_total),
            *(*chunks.sizes, *both, *v.stride()[:2]),
            **chunks.blocks,
        )
        _grad_queries[by_group](
            *(k, written, grad_y, *shared, states, grad_q, *chunks.sizes, *both[2:]), **chunks.parts
        )
        _grad_keys[by_group](
            *(q, k, chunks.beta, written, grad_written, grad_y, *shared, states, grad_states, grad_k),
            *(grad_beta, grad_total, *chunks.sizes, *both),
            **chunks.parts,
        )
        # A decay is in the totals of its own token and of all later ones of the chunk. What leaves the chunk decays by
        # the difference to the chunk's last total.
        found, leaves = (t.view(chunks.count, CHUNK, -1) for t in (grad_total, leaving.sum(0)))
        sums = leaves.cumsum(1) - leaves + through.sum(0)[:, None]
        grad_decay = (found.flip(1).cumsum(1).flip(1) + sums).reshape(chunks.rows, -1)[: chunks.tokens]
        return grad_q, grad_k, grad_v, grad_decay.to(decay.dtype), grad_beta[: chunks.tokens].to(beta.dtype), None


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, sequences: PackedSequences) -> Tensor:
    """See :func:`megalight.ops.delta_rule.delta_rule`."""
    out: Tensor = apply(_Rule, *_prepared(q, k, v), decay, beta, sequences.positions)
    return out[..., : v.shape[-1]]


@jit
def _decode(
    q: Value, k: Value, v: Value, decay: Value, beta: Value, entries: Value, slots: Value, lengths: Value, y: Value,
    heads: Value, per: Value, width: Value, size: Value, q_token: Value, q_group: Value, k_token: Value,
    k_group: Value, v_token: Value, v_head: Value, decay_token: Value, decay_head: Value, beta_token: Value,
    beta_head: Value, WIDTH: constexpr, VALUES: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Take one token of a sequence into some features of the state ``[K, V]`` of a head, and write its output."""
    start_dependents(PDL)
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, feature = tl.arange(0, WIDTH), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    inside, known = row < width, feature < size
    both = inside[:, None] & known[None, :]
    place = (tl.load(slots + sequence) * heads + head) * width * size + row[:, None] * size + feature[None, :]
    # a slot still holds the state of the text before, which a new one must not see
    state = tl.load(entries + place, mask=both & (tl.load(lengths + sequence) > 1), other=0.0)
    group = head // per
    query = tl.load(q + sequence * q_token + group * q_group + row, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(k + sequence * k_token + group * k_group + row, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(v + sequence * v_token + head * v_head + feature, mask=known, other=0.0).to(tl.float32)
    state *= tl.exp(tl.load(decay + sequence * decay_token + head * decay_head).to(tl.float32))
    rate = tl.load(beta + sequence * beta_token + head * beta_head).to(tl.float32)
    written = rate * (value - tl.sum(state * key[:, None], 0))
    state += key[:, None] * written[None, :]
    tl.store(entries + place, state, mask=both)
    out = tl.sum(state * query[:, None], 0)
    tl.store(y + (sequence * heads + head) * size + feature, out.to(y.dtype.element_ty), mask=known)


def delta_rule_continued(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, entries: Tensor, pages: Pages
) -> Tensor:
    """See :func:`megalight.ops.delta_rule.delta_rule_continued`."""
    q, k, v = (last_contiguous(rows) for rows in (q, k, v))
    (_, heads, size), (groups, width), count = v.shape, k.shape[1:], pages.decodes
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if count:
        pdl = OVERLAP.on
        _decode[(count, heads, cdiv(size, FEATURES))](
            *(q, k, v, decay, beta, entries, pages.state_slot, pages.lengths, y, heads, heads // groups, width, size),
            *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *decay.stride(), *beta.stride()),
            WIDTH=next_power(width), VALUES=FEATURES, PDL=pdl, launch_pdl=pdl, num_warps=4,
        )  # fmt: skip
    if count < len(pages.query_lengths):
        _prefill(q, k, v, decay, beta, entries, pages, y)
    return y


def _prefill(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, entries: Tensor, pages: Pages, y: Tensor
) -> None:
    """Continue the sequences that do not decode, and write ``y``.

    Every sequence gets chunks of its own, so that a chunk begins with the state of one sequence.
    """
    states = pages.read(entries)[pages.decodes :]
    firsts, places, count = pages.chunks(CHUNK, len(v))
    padded, skipped = count * CHUNK, len(v) - len(places)
    width, size = states.shape[-2:]
    q, k, v, decay, beta = (each[skipped:] for each in (q, k, v, decay, beta))
    q, k, v, decay, beta = (
        torch.zeros(padded, *t.shape[1:], dtype=t.dtype, device=t.device).index_copy_(0, places, t)
        for t in (*_prepared(q, k, v), decay, beta)
    )
    # All tokens belong to a sequence that began earlier.
    chunks = _Chunks(k, v, decay, beta, torch.full((padded,), -1, device=v.device))
    chunk = torch.arange(count, dtype=torch.int32, device=v.device)
    number = (torch.searchsorted(firsts, chunk, right=True) - 1).clamp(max=len(states) - 1)
    ends = torch.stack([firsts[number] == chunk, firsts[number + 1] == chunk + 1], 1) & (chunk < firsts[-1])[:, None]
    before = F.pad(states.float(), (0, v.shape[-1] - size, 0, k.shape[-1] - width)).contiguous()
    after = torch.empty_like(before)
    enter = torch.where(ends, number[:, None], -1).int().flatten(), before, after
    written, _, passed = chunks.written(k, v, chunks.inverses(k), enter)
    found = chunks.outputs(q, k, written, passed)[places, :, :size]
    # Of a recorded pass, only the device knows which tokens decode.
    y[skipped:] = torch.where((places < padded - 1)[:, None, None], found, y) if pages.recorded else found
    entries[pages.state_slot[pages.decodes :]] = after[:, :, :width, :size].to(entries.dtype)
