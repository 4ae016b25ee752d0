"""The states between chunks: one pass over time, with the state in registers."""

from __future__ import annotations

from megalight.ops.jit import Value, constexpr, jit, tl
from megalight.ops.ssd.blocks import load_block, store_block


@jit
def _pass(
    x: Value,
    keys: Value,
    weights: Value,
    steps: Value,
    kept: Value,
    out: Value,
    tokens: Value,
    rows: Value,
    chunks: Value,
    heads: Value,
    per: Value,
    size: Value,
    width: Value,
    x_token: Value,
    x_head: Value,
    keys_token: Value,
    keys_group: Value,
    BACK: constexpr,
    CHUNK: constexpr,
    SIZE: constexpr,
    PART: constexpr,
) -> None:
    """Write the state before every chunk, ``[P, N]``, for some columns of it and one head.

    A chunk adds ``sum_t weights[t] steps[t] x[t] keys[t]^T``. With ``BACK``, time runs backward, steps do not count,
    and what is written are the states after the chunks.
    """
    column, head = tl.program_id(0) * PART, tl.program_id(1)
    group = head // per
    state = tl.zeros((SIZE, PART), tl.float32)
    token = tl.arange(0, CHUNK)
    factors = kept + head * chunks
    following = tl.load(factors + (chunks - 1 if BACK else 0))
    for number in range(chunks):
        chunk = number
        if BACK:
            chunk = chunks - 1 - number
        first = tl.cast(chunk, tl.int64) * CHUNK
        left = tokens - chunk * CHUNK
        weight = tl.load(weights + head * rows + chunk * CHUNK + token)
        if not BACK:
            weight *= tl.load(steps + head * rows + chunk * CHUNK + token)
        # the next chunk's, as the product of this one would wait for its own
        factor = following
        following = tl.load(factors + tl.maximum(chunk - 1, 0) if BACK else factors + tl.minimum(chunk + 1, chunks - 1))
        value = load_block(x + first * x_token + head * x_head, x_token, left, size, CHUNK, SIZE)
        source = keys + first * keys_token + group * keys_group + column
        key = load_block(source, keys_token, left, width - column, CHUNK, PART)
        target = out + (tl.cast(chunk, tl.int64) * heads + head) * size * width + column
        store_block(target, width, size, width - column, state, SIZE, PART)
        weighted = (tl.trans(value).to(tl.float32) * weight[None, :]).to(value.dtype)
        state = tl.dot(weighted, key, state * factor, input_precision="ieee")


@jit
def pass_states(
    x: Value,
    keys: Value,
    grad_y: Value,
    queries: Value,
    to_end: Value,
    reach: Value,
    steps: Value,
    kept: Value,
    states: Value,
    grad_states: Value,
    tokens: Value,
    rows: Value,
    chunks: Value,
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
    BOTH: constexpr,
    CHUNK: constexpr,
    SIZE: constexpr,
    PART: constexpr,
) -> None:
    """Write the states before the chunks, and with ``BOTH`` in further programs the gradients of those after them.

    Neither pass fills a device: each waits for its own products.
    """
    if tl.program_id(2) == 0:
        _pass(
            *(x, keys, to_end, steps, kept, states, tokens, rows, chunks, heads, per, size, width),
            *(x_token, x_head, keys_token, keys_group, False, CHUNK, SIZE, PART),
        )
    elif BOTH:
        _pass(
            *(grad_y, queries, reach, steps, kept, grad_states, tokens, rows, chunks, heads, per, size, width),
            *(heads * size, size, queries_token, queries_group, True, CHUNK, SIZE, PART),
        )
