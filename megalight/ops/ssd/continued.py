"""The scan of sequences that go on from stored states: one kernel for those with one new token, chunks for the others.

A decode step reads and writes each state once, in its pool. Longer parts get chunks of their own: the kernels of whole
sequences then serve them, but that states pass between the chunks of one sequence, and come from the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.common import last_contiguous
from megalight.ops.jit import OVERLAP, Value, cdiv, constexpr, jit, next_power, start_dependents, tl
from megalight.ops.ssd import step_sizes
from megalight.ops.ssd.triton import CHUNK, PART, TALL, Chunks
from megalight.ops.ssd.triton_kernels import load_block, pass_states, softplus, store_block
from megalight.types import Pages

FEATURES = 16
"""Features of a head of a program of a decode step: a text of many heads must fill a GPU alone."""


@jit
def _decode(
    x: Value, dt: Value, a: Value, b: Value, c: Value, d: Value, bias: Value, entries: Value, slots: Value,
    lengths: Value, y: Value, heads: Value, per: Value, size: Value, width: Value, x_token: Value, x_head: Value,
    dt_token: Value, dt_head: Value, b_token: Value, b_group: Value, c_token: Value, c_group: Value,
    BIAS: constexpr, FEATURES: constexpr, WIDTH: constexpr, PDL: constexpr,
) -> None:  # fmt: skip
    """Take one token of a sequence into the state ``[P, N]`` of a head, for some features, and write its output."""
    start_dependents(PDL)
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    feature, column = tl.program_id(2) * FEATURES + tl.arange(0, FEATURES), tl.arange(0, WIDTH)
    known, inside = feature < size, column < width
    place = (tl.load(slots + sequence) * heads + head) * size * width + feature[:, None] * width + column[None, :]
    # a slot still holds the state of the text before, which a new one must not see
    stored = known[:, None] & inside[None, :] & (tl.load(lengths + sequence) > 1)
    state = tl.load(entries + place, mask=stored, other=0.0)
    step = tl.load(dt + sequence * dt_token + head * dt_head).to(tl.float32)
    if BIAS:
        step = softplus(step + tl.load(bias + head).to(tl.float32))
    own = tl.load(x + sequence * x_token + head * x_head + feature, mask=known, other=0.0).to(tl.float32)
    group = head // per
    key = tl.load(b + sequence * b_token + group * b_group + column, mask=inside, other=0.0).to(tl.float32)
    query = tl.load(c + sequence * c_token + group * c_group + column, mask=inside, other=0.0).to(tl.float32)
    state = tl.exp(step * tl.load(a + head).to(tl.float32)) * state + (step * own)[:, None] * key[None, :]
    tl.store(entries + place, state, mask=known[:, None] & inside[None, :])
    out = tl.sum(state * query[None, :], 1) + tl.load(d + head).to(tl.float32) * own
    tl.store(y + (sequence * heads + head) * size + feature, out.to(y.dtype.element_ty), mask=known)


@jit
def _pass_on(
    x: Value, keys: Value, weights: Value, steps: Value, kept: Value, states: Value, entries: Value, slots: Value,
    lengths: Value, cu_queries: Value, firsts: Value, begin: Value, rows: Value, chunks: Value, heads: Value,
    per: Value, size: Value, width: Value, x_token: Value, x_head: Value, keys_token: Value, keys_group: Value,
    CHUNK: constexpr, SIZE: constexpr, PART: constexpr,
) -> None:  # fmt: skip
    """Write the states before the chunks of a sequence, and the one after them into the pool."""
    column, head = tl.program_id(0) * PART, tl.program_id(1)
    number = tl.program_id(2)
    sequence = begin + number
    entry = entries + (tl.load(slots + sequence) * heads + head) * size * width + column
    new = tl.load(cu_queries + sequence + 1) - tl.load(cu_queries + sequence)
    earlier = tl.load(lengths + sequence) > new
    state = load_block(entry, width, tl.where(earlier, size, 0), width - column, SIZE, PART).to(tl.float32)
    token = tl.arange(0, CHUNK)
    for chunk in range(tl.load(firsts + number), tl.load(firsts + number + 1)):
        first = tl.cast(chunk, tl.int64) * CHUNK
        target = states + (tl.cast(chunk, tl.int64) * heads + head) * size * width + column
        store_block(target, width, size, width - column, state, SIZE, PART)
        weight = tl.load(weights + head * rows + first + token) * tl.load(steps + head * rows + first + token)
        value = load_block(x + first * x_token + head * x_head, x_token, CHUNK, size, CHUNK, SIZE)
        source = keys + first * keys_token + head // per * keys_group + column
        key = load_block(source, keys_token, CHUNK, width - column, CHUNK, PART)
        weighted = (tl.trans(value).to(tl.float32) * weight[None, :]).to(value.dtype)
        state = tl.dot(weighted, key, state * tl.load(kept + head * chunks + chunk), input_precision="ieee")
    store_block(entry, width, size, width - column, state, SIZE, PART)


def ssd_continued(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    entries: Tensor,
    pages: Pages,
    bias: Tensor | None = None,
) -> Tensor:
    """See :func:`megalight.ops.ssd.ssd_continued`."""
    x, b, c = (last_contiguous(rows) for rows in (x, b, c))
    (_, heads, size), (groups, width), count = x.shape, b.shape[1:], pages.decodes
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if count:
        pdl = OVERLAP.on
        _decode[(count, heads, cdiv(size, FEATURES))](
            *(x, dt, a, b, c, d, bias, entries, pages.state_slot, pages.lengths, y, heads, heads // groups, size),
            *(width, *x.stride()[:2], *dt.stride(), *b.stride()[:2], *c.stride()[:2]),
            BIAS=bias is not None, FEATURES=FEATURES, WIDTH=next_power(width), PDL=pdl, launch_pdl=pdl, num_warps=4,
        )  # fmt: skip
    if count < len(pages.query_lengths):
        steps = dt if bias is None else step_sizes(dt, bias)
        _prefill(x, steps, a, b, c, d, entries, pages, y)
    return y


def _prefill(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, entries: Tensor, pages: Pages, y: Tensor
) -> None:
    """Continue the sequences that do not decode, in chunks that hold tokens of one sequence each; write ``y``."""
    begin, device = pages.decodes, x.device
    firsts, places, count = pages.chunks(CHUNK, len(x))
    rows, skipped = count * CHUNK, len(x) - len(places)
    x, dt, b, c = (each[skipped:] for each in (x, dt, b, c))
    # Step sizes of 0 after a sequence's last token leave its state as it is.
    x, dt, b, c = (each.new_zeros(rows, *each.shape[1:]).index_copy_(0, places, each) for each in (x, dt, b, c))
    # Every token belongs to a sequence that began before its chunk.
    positions = torch.arange(rows, 2 * rows, device=device)
    chunks = Chunks(x, dt, a, b, positions, None)
    states = torch.empty(chunks.count, chunks.heads, chunks.size, chunks.width, dtype=x.dtype, device=device)
    part = min(PART, chunks.blocks["WIDTH"])
    _pass_on[(cdiv(chunks.width, part), chunks.heads, len(firsts) - 1)](
        *(x, b, chunks.to_end, chunks.steps, chunks.kept, states, entries, pages.state_slot, pages.lengths),
        *(pages.cu_queries, firsts, begin, chunks.rows, chunks.count, *chunks.sizes),
        *(*x.stride()[:2], *b.stride()[:2]),
        CHUNK=CHUNK, SIZE=max(TALL, chunks.blocks["SIZE"]), PART=part, **chunks.launch(pass_states),
    )  # fmt: skip
    found = chunks.outputs(x, b, c, d, states)[places]
    # Of a recorded pass, only the device knows which tokens decode.
    y[skipped:] = torch.where((places < rows - 1)[:, None, None], found, y) if pages.recorded else found
