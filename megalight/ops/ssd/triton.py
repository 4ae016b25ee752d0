"""The scan in chunks: kernels for the states of chunks, for outputs, and for gradients.

Notation: ``total`` is the logarithm of the decay from a chunk's beginning to a token, the token's own included.
``first`` is a chunk's first token. A token reads the state before its chunk if its sequence began before ``first``, and
adds to the state after it if its sequence is that of the chunk's last token. Nothing else crosses a chunk's border.

No product of two exponentials of unlike sign is formed: every exponent is a difference that is at most 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import apply, once_differentiable
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl
from megalight.ops.recurrence import decays, load_matrix, load_rows

CHUNK = 128
"""Tokens per chunk. Longer chunks mean fewer states in memory, and more products within a chunk."""
ROWS = 64
"""Tokens of a chunk that a program computes at once; a divisor of ``CHUNK``."""
PASSED = 256
"""Elements of a state that a program passes from chunk to chunk."""


@jit
def _states(
    x: Value,
    keys: Value,
    dt: Value,
    totals: Value,
    starts: Value,
    out: Value,
    tokens: Value,
    heads: Value,
    per: Value,
    size: Value,
    width: Value,
    x_token: Value,
    x_head: Value,
    keys_token: Value,
    keys_group: Value,
    ADDED: constexpr,
    CHUNK: constexpr,
    SIZE: constexpr,
    WIDTH: constexpr,
) -> None:
    """Write ``sum_t w[t] x[t] keys[t]^T`` of a chunk and a head, ``[P, N]``.

    With ``ADDED``, the weights are those with which tokens add to the state after the chunk; otherwise those with which
    they read the state before it.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    first = chunk * CHUNK
    token = first + tl.arange(0, CHUNK)
    total = tl.load(totals + token * heads + head)
    start = tl.load(starts + token)
    if ADDED:
        last = tl.load(totals + (first + CHUNK - 1) * heads + head)
        counts = start == tl.load(starts + first + CHUNK - 1)
        weight = tl.exp(tl.where(counts, last - total, float("-inf"))) * tl.load(dt + token * heads + head)
    else:
        weight = tl.exp(tl.where(start < first, total, float("-inf")))
    values = load_rows(x + head * x_head, x_token, token, tokens, size, SIZE)
    others = load_rows(keys + head // per * keys_group, keys_token, token, tokens, width, WIDTH)
    weighted = (values.to(tl.float32) * weight[:, None]).to(values.dtype)
    state = tl.dot(tl.trans(weighted), others, input_precision="ieee")
    row, column = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    target = out + (chunk.to(tl.int64) * heads + head) * size * width
    inside = (row < size)[:, None] & (column < width)[None, :]
    tl.store(target + row[:, None] * width + column[None, :], state, mask=inside)


@jit
def _pass(
    states: Value,
    kept: Value,
    before: Value,
    parts: Value,
    chunks: Value,
    heads: Value,
    elements: Value,
    REVERSE: constexpr,
    BLOCK: constexpr,
) -> None:
    """Turn what every chunk adds into the sum of what all chunks before it added, each decayed, in place.

    With ``REVERSE``, from the last chunk to the first; ``parts`` then gets ``kept sum(result * before)``, the gradient
    of the logarithm of ``kept``.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    element = block * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements
    state = tl.zeros((BLOCK,), tl.float32)
    for step in range(chunks):
        chunk = step
        if REVERSE:
            chunk = chunks - 1 - step
        place = (tl.cast(chunk, tl.int64) * heads + head) * elements + element
        added = tl.load(states + place, mask=inside, other=0.0)
        factor = tl.load(kept + chunk * heads + head)
        tl.store(states + place, state, mask=inside)
        if REVERSE:
            earlier = tl.load(before + place, mask=inside, other=0.0)
            tl.store(parts + (block * chunks + chunk) * heads + head, factor * tl.sum(state * earlier, 0))
        state = factor * state + added


@jit
def _outputs(
    x: Value,
    keys: Value,
    queries: Value,
    dt: Value,
    d: Value,
    totals: Value,
    starts: Value,
    states: Value,
    y: Value,
    tokens: Value,
    heads: Value,
    per: Value,
    size: Value,
    width: Value,
    x_token: Value,
    x_head: Value,
    keys_token: Value,
    keys_group: Value,
    queries_token: Value,
    queries_group: Value,
    CHUNK: constexpr,
    ROWS: constexpr,
    SIZE: constexpr,
    WIDTH: constexpr,
) -> None:
    """Write ``y`` of some rows of a chunk, for one head."""
    program, head = tl.program_id(0), tl.program_id(1)
    first = program // (CHUNK // ROWS) * CHUNK
    begin = program % (CHUNK // ROWS) * ROWS
    i = first + begin + tl.arange(0, ROWS)
    total_i = tl.load(totals + i * heads + head)
    start_i = tl.load(starts + i)
    query = load_rows(queries + head // per * queries_group, queries_token, i, tokens, width, WIDTH)
    # from the state before the chunk
    reach = tl.exp(tl.where(start_i < first, total_i, float("-inf")))
    state = load_matrix(
        states + ((first // CHUNK).to(tl.int64) * heads + head) * size * width, size, width, SIZE, WIDTH
    )
    out = tl.dot(query, tl.trans(state.to(query.dtype)), input_precision="ieee") * reach[:, None]
    for place in range(0, begin + ROWS, ROWS):
        j = first + place + tl.arange(0, ROWS)
        decay = decays(total_i, tl.load(totals + j * heads + head), start_i, tl.load(starts + j), i, j)
        key = load_rows(keys + head // per * keys_group, keys_token, j, tokens, width, WIDTH)
        value = load_rows(x + head * x_head, x_token, j, tokens, size, SIZE)
        weight = tl.dot(query, tl.trans(key), input_precision="ieee") * decay
        weight *= tl.load(dt + j * heads + head)[None, :]
        out += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    own = load_rows(x + head * x_head, x_token, i, tokens, size, SIZE)
    out += tl.load(d + head) * own.to(tl.float32)
    feature = tl.arange(0, SIZE)
    target = y + (i.to(tl.int64)[:, None] * heads + head) * size + feature[None, :]
    tl.store(target, out.to(y.dtype.element_ty), mask=(i < tokens)[:, None] & (feature < size)[None, :])


@jit
def _grad_inputs(
    x: Value,
    keys: Value,
    queries: Value,
    grad_y: Value,
    dt: Value,
    d: Value,
    totals: Value,
    starts: Value,
    grad_states: Value,
    grad_x: Value,
    direct: Value,
    leaving: Value,
    added: Value,
    skip: Value,
    arriving: Value,
    tokens: Value,
    rows: Value,
    heads: Value,
    per: Value,
    size: Value,
    width: Value,
    x_token: Value,
    x_head: Value,
    keys_token: Value,
    keys_group: Value,
    queries_token: Value,
    queries_group: Value,
    CHUNK: constexpr,
    ROWS: constexpr,
    SIZE: constexpr,
    WIDTH: constexpr,
) -> None:
    """Write the gradient of some rows of ``x``, and the sums that the gradients of ``dt`` and of decays are made of.

    ``direct``: gradient of ``dt`` without decays. ``leaving`` and ``arriving``: the pairs of tokens within the chunk,
    summed over the later and over the earlier token. Both are sums of the same float32 numbers, so that their
    difference is exact where it should be 0. ``added``: what a token adds to the state after the chunk. ``skip``:
    gradient of ``d``.
    """
    program, head = tl.program_id(0), tl.program_id(1)
    first = program // (CHUNK // ROWS) * CHUNK
    begin = program % (CHUNK // ROWS) * ROWS
    j = first + begin + tl.arange(0, ROWS)
    place_j = j * heads + head
    total_j = tl.load(totals + place_j)
    start_j = tl.load(starts + j)
    step = tl.load(dt + place_j)
    value = load_rows(x + head * x_head, x_token, j, tokens, size, SIZE)
    key = load_rows(keys + head // per * keys_group, keys_token, j, tokens, width, WIDTH)
    grad_own = load_rows(grad_y + head * size, heads * size, j, tokens, size, SIZE)
    # through the state after the chunk
    last = tl.load(totals + (first + CHUNK - 1) * heads + head)
    counts = start_j == tl.load(starts + first + CHUNK - 1)
    to_end = tl.exp(tl.where(counts, last - total_j, float("-inf")))
    chunk = (first // CHUNK).to(tl.int64)
    state = load_matrix(grad_states + (chunk * heads + head) * size * width, size, width, SIZE, WIDTH)
    later = tl.dot(key, tl.trans(state.to(key.dtype)), input_precision="ieee") * to_end[:, None]
    wide = value.to(tl.float32)
    through = tl.sum(wide * later, 1)
    grad = later
    pairs = tl.zeros((ROWS,), tl.float32)
    for place in range(begin, CHUNK, ROWS):
        i = first + place + tl.arange(0, ROWS)
        decay = decays(tl.load(totals + i * heads + head), total_j, tl.load(starts + i), start_j, i, j)
        query = load_rows(queries + head // per * queries_group, queries_token, i, tokens, width, WIDTH)
        grad_i = load_rows(grad_y + head * size, heads * size, i, tokens, size, SIZE)
        weight = tl.dot(query, tl.trans(key), input_precision="ieee") * decay
        both = weight * tl.dot(grad_i, tl.trans(value), input_precision="ieee")
        grad += tl.dot(tl.trans(weight).to(grad_i.dtype), grad_i, input_precision="ieee")
        pairs += tl.sum(both, 0)
        # one plane for each block of earlier tokens: no two programs write the same place
        plane = arriving + (program % (CHUNK // ROWS)).to(tl.int64) * rows * heads
        tl.store(plane + i * heads + head, tl.sum(both * step[None, :], 1))
    tl.store(direct + place_j, pairs + through)
    tl.store(leaving + place_j, pairs * step)
    tl.store(added + place_j, through * step)
    tl.store(skip + place_j, tl.sum(wide * grad_own.to(tl.float32), 1))
    grad = grad * step[:, None] + tl.load(d + head) * grad_own.to(tl.float32)
    feature = tl.arange(0, SIZE)
    target = grad_x + (j.to(tl.int64)[:, None] * heads + head) * size + feature[None, :]
    tl.store(target, grad.to(grad_x.dtype.element_ty), mask=(j < tokens)[:, None] & (feature < size)[None, :])


@jit
def _grad_queries(
    x: Value,
    keys: Value,
    queries: Value,
    grad_y: Value,
    dt: Value,
    totals: Value,
    starts: Value,
    states: Value,
    grad_queries: Value,
    read: Value,
    tokens: Value,
    heads: Value,
    per: Value,
    size: Value,
    width: Value,
    x_token: Value,
    x_head: Value,
    keys_token: Value,
    keys_group: Value,
    queries_token: Value,
    queries_group: Value,
    CHUNK: constexpr,
    ROWS: constexpr,
    SIZE: constexpr,
    WIDTH: constexpr,
) -> None:
    """Write the gradient of some rows of ``c``, summed over the heads of a group.

    ``read`` gets, for each head, what a token reads of the state before the chunk, times its gradient.
    """
    program, group = tl.program_id(0), tl.program_id(1)
    first = program // (CHUNK // ROWS) * CHUNK
    begin = program % (CHUNK // ROWS) * ROWS
    i = first + begin + tl.arange(0, ROWS)
    start_i = tl.load(starts + i)
    chunk = (first // CHUNK).to(tl.int64)
    grad = tl.zeros((ROWS, WIDTH), tl.float32)
    for head in range(group * per, group * per + per):
        total_i = tl.load(totals + i * heads + head)
        grad_i = load_rows(grad_y + head * size, heads * size, i, tokens, size, SIZE)
        reach = tl.exp(tl.where(start_i < first, total_i, float("-inf")))
        state = load_matrix(states + (chunk * heads + head) * size * width, size, width, SIZE, WIDTH).to(grad_i.dtype)
        earlier = tl.dot(grad_i, state, input_precision="ieee") * reach[:, None]
        query = load_rows(queries + group * queries_group, queries_token, i, tokens, width, WIDTH).to(tl.float32)
        tl.store(read + i * heads + head, tl.sum(earlier * query, 1))
        grad += earlier
    for place in range(0, begin + ROWS, ROWS):
        j = first + place + tl.arange(0, ROWS)
        start_j = tl.load(starts + j)
        # The heads share keys: their weights are summed first, and multiplied once.
        weight = tl.zeros((ROWS, ROWS), tl.float32)
        for head in range(group * per, group * per + per):
            total_i, total_j = tl.load(totals + i * heads + head), tl.load(totals + j * heads + head)
            decay = decays(total_i, total_j, start_i, start_j, i, j) * tl.load(dt + j * heads + head)[None, :]
            grad_i = load_rows(grad_y + head * size, heads * size, i, tokens, size, SIZE)
            value = load_rows(x + head * x_head, x_token, j, tokens, size, SIZE)
            weight += tl.dot(grad_i, tl.trans(value), input_precision="ieee") * decay
        key = load_rows(keys + group * keys_group, keys_token, j, tokens, width, WIDTH)
        grad += tl.dot(weight.to(key.dtype), key, input_precision="ieee")
    feature = tl.arange(0, WIDTH)
    target = grad_queries + (i.to(tl.int64)[:, None] * (heads // per) + group) * width + feature[None, :]
    tl.store(target, grad.to(grad_queries.dtype.element_ty), mask=(i < tokens)[:, None] & (feature < width)[None, :])


@jit
def _grad_keys(
    x: Value,
    queries: Value,
    grad_y: Value,
    dt: Value,
    totals: Value,
    starts: Value,
    grad_states: Value,
    grad_keys: Value,
    tokens: Value,
    heads: Value,
    per: Value,
    size: Value,
    width: Value,
    x_token: Value,
    x_head: Value,
    queries_token: Value,
    queries_group: Value,
    CHUNK: constexpr,
    ROWS: constexpr,
    SIZE: constexpr,
    WIDTH: constexpr,
) -> None:
    """Write the gradient of some rows of ``b``, summed over the heads of a group."""
    program, group = tl.program_id(0), tl.program_id(1)
    first = program // (CHUNK // ROWS) * CHUNK
    begin = program % (CHUNK // ROWS) * ROWS
    j = first + begin + tl.arange(0, ROWS)
    start_j = tl.load(starts + j)
    counts = start_j == tl.load(starts + first + CHUNK - 1)
    chunk = (first // CHUNK).to(tl.int64)
    grad = tl.zeros((ROWS, WIDTH), tl.float32)
    for head in range(group * per, group * per + per):
        total_j = tl.load(totals + j * heads + head)
        value = load_rows(x + head * x_head, x_token, j, tokens, size, SIZE)
        last = tl.load(totals + (first + CHUNK - 1) * heads + head)
        to_end = tl.exp(tl.where(counts, last - total_j, float("-inf"))) * tl.load(dt + j * heads + head)
        state = load_matrix(grad_states + (chunk * heads + head) * size * width, size, width, SIZE, WIDTH).to(
            value.dtype
        )
        grad += tl.dot(value, state, input_precision="ieee") * to_end[:, None]
    for place in range(begin, CHUNK, ROWS):
        i = first + place + tl.arange(0, ROWS)
        start_i = tl.load(starts + i)
        # The heads share queries: their weights are summed first, and multiplied once.
        weight = tl.zeros((ROWS, ROWS), tl.float32)
        for head in range(group * per, group * per + per):
            total_i, total_j = tl.load(totals + i * heads + head), tl.load(totals + j * heads + head)
            decay = decays(total_i, total_j, start_i, start_j, i, j) * tl.load(dt + j * heads + head)[None, :]
            grad_i = load_rows(grad_y + head * size, heads * size, i, tokens, size, SIZE)
            value = load_rows(x + head * x_head, x_token, j, tokens, size, SIZE)
            weight += tl.dot(grad_i, tl.trans(value), input_precision="ieee") * decay
        query = load_rows(queries + group * queries_group, queries_token, i, tokens, width, WIDTH)
        grad += tl.dot(tl.trans(weight).to(query.dtype), query, input_precision="ieee")
    feature = tl.arange(0, WIDTH)
    target = grad_keys + (j.to(tl.int64)[:, None] * (heads // per) + group) * width + feature[None, :]
    tl.store(target, grad.to(grad_keys.dtype.element_ty), mask=(j < tokens)[:, None] & (feature < width)[None, :])


class _Chunks:
    """What all kernels of a call share: sizes, and steps and decays of the tokens in chunks."""

    def __init__(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, positions: Tensor) -> None:
        self.tokens, self.heads, self.size = x.shape
        self.groups, self.width = b.shape[1:]
        self.count = cdiv(self.tokens, CHUNK)
        self.rows = self.count * CHUNK
        missing = self.rows - self.tokens
        # Padding has steps of 0 and continues the last sequence: it neither adds to states nor decays them.
        self.dt = F.pad(dt.float(), (0, 0, 0, missing)).contiguous()
        starts = torch.arange(self.tokens, device=x.device) - positions
        self.starts = torch.cat([starts, starts[-1:].expand(missing)]).int()
        totals = (self.dt * a.float()).view(self.count, CHUNK, -1).cumsum(1)
        self.totals = totals.view(self.rows, -1)
        first = torch.arange(self.count, device=x.device) * CHUNK
        crosses = self.starts.view(self.count, CHUNK)[:, -1] < first
        self.kept = totals[:, -1].exp() * crosses[:, None]
        self.blocks: dict[str, Any] = {
            "CHUNK": CHUNK,
            "SIZE": max(16, next_power(self.size)),
            "WIDTH": max(16, next_power(self.width)),
        }

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Heads, heads per group, features of a head, and width of a state."""
        return self.heads, self.heads // self.groups, self.size, self.width

    @property
    def grid(self) -> int:
        """Programs of a kernel that computes ``ROWS`` tokens at once."""
        return self.count * (CHUNK // ROWS)

    def states(self, x: Tensor, keys: Tensor, added: bool) -> Tensor:
        """Return ``[chunks, H, P, N]``, what each chunk adds to the state, or how it reads it."""
        out = torch.empty(self.count, self.heads, self.size, self.width, dtype=torch.float32, device=x.device)
        strides = (*x.stride()[:2], *keys.stride()[:2])
        args = (x, keys, self.dt, self.totals, self.starts, out, self.tokens, *self.sizes, *strides)
        _states[(self.count, self.heads)](*args, ADDED=added, **self.blocks, num_warps=4)
        return out

    def passed(self, states: Tensor, before: Tensor | None = None) -> Tensor | None:
        """Pass states from chunk to chunk in place; with ``before``, their gradients from the last to the first.

        Returns:
            with ``before``, the gradient ``[chunks, H]`` of the logarithm of ``kept``.
        """
        elements = self.size * self.width
        blocks = cdiv(elements, PASSED)
        parts = None if before is None else self.kept.new_empty(blocks, self.count, self.heads)
        args = (states, self.kept, before, parts, self.count, self.heads, elements)
        _pass[(blocks, self.heads)](*args, REVERSE=before is not None, BLOCK=PASSED, num_warps=4)
        return None if parts is None else parts.sum(0)

    def before(self, x: Tensor, b: Tensor) -> Tensor:
        """Return ``[chunks, H, P, N]``, the states before the chunks."""
        states = self.states(x, b, True)
        self.passed(states)
        return states


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, positions: Tensor
    ) -> Tensor:
        x, b, c = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (x, b, c))
        chunks = _Chunks(x, dt, a, b, positions)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        strides = (*x.stride()[:2], *b.stride()[:2], *c.stride()[:2])
        args = (x, b, c, chunks.dt, d, chunks.totals, chunks.starts, chunks.before(x, b), y, chunks.tokens)
        _outputs[(chunks.grid, chunks.heads)](*args, *chunks.sizes, *strides, ROWS=ROWS, **chunks.blocks, num_warps=4)
        # States are computed again in backward: they are as large as the inputs of several layers.
        ctx.save_for_backward(x, dt, a, b, c, d, positions)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, d, positions = ctx.saved_tensors
        grad_y = grad_y.contiguous()
        chunks = _Chunks(x, dt, a, b, positions)
        before = chunks.before(x, b)
        # gradients of the states after the chunks
        grad_states = chunks.states(grad_y, c, False)
        through = chunks.passed(grad_states, before)
        assert through is not None
        strides = (*x.stride()[:2], *b.stride()[:2], *c.stride()[:2])
        grad_x, grad_b, grad_c = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, b, c))
        direct, leaving, added, skip, read = (torch.empty_like(chunks.totals) for _ in range(5))
        # a program writes rows at and after its own: the others must be 0
        arriving = chunks.totals.new_zeros(CHUNK // ROWS, *chunks.totals.shape)
        common = (chunks.totals, chunks.starts)
        _grad_inputs[(chunks.grid, chunks.heads)](
            *(x, b, c, grad_y, chunks.dt, d, *common, grad_states, grad_x, direct, leaving, added, skip, arriving),
            *(chunks.tokens, chunks.rows, *chunks.sizes, *strides),
            ROWS=ROWS,
            **chunks.blocks,
            num_warps=8,
        )
        _grad_queries[(chunks.grid, chunks.groups)](
            *(x, b, c, grad_y, chunks.dt, *common, before, grad_c, read, chunks.tokens, *chunks.sizes, *strides),
            ROWS=ROWS,
            **chunks.blocks,
            num_warps=8,
        )
        _grad_keys[(chunks.grid, chunks.groups)](
            *(x, c, grad_y, chunks.dt, *common, grad_states, grad_b, chunks.tokens, *chunks.sizes),
            *(*strides[:2], *strides[4:]),
            ROWS=ROWS,
            **chunks.blocks,
            num_warps=8,
        )
        # A decay is in every pair of an earlier token and one that is not earlier than the decay's own.
        tokens, shape = chunks.tokens, (chunks.count, CHUNK, chunks.heads)
        pairs = (arriving.sum(0) + read - leaving).view(shape)
        sums = added.view(shape).cumsum(1)
        decays = pairs.flip(1).cumsum(1).flip(1) + (sums - added.view(shape)) + through[:, None]
        grad_decay = decays.view(chunks.totals.shape)[:tokens]
        grad_dt = direct[:tokens] + grad_decay * a.float()
        grad_a = (grad_decay * dt.float()).sum(0)
        return (
            grad_x,
            grad_dt.to(dt.dtype),
            grad_a.to(a.dtype),
            grad_b,
            grad_c,
            skip[:tokens].sum(0).to(d.dtype),
            None,
        )


def ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, positions: Tensor) -> Tensor:
    """See :func:`megalight.ops.ssd.ssd`."""
    out: Tensor = apply(_Scan, x, dt, a, b, c, d, positions)
    return out
