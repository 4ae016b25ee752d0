"""Gradients of a chunk's keys and queries, which the heads of a group share."""

from __future__ import annotations

from megalight.ops.jit import Value, constexpr, jit, tl
from megalight.ops.ssd.blocks import load_block, store_block


@jit
def grad_shared(
    x: Value,
    keys: Value,
    queries: Value,
    grad_y: Value,
    steps: Value,
    reach: Value,
    to_end: Value,
    kept: Value,
    states: Value,
    grad_states: Value,
    grad_pairs: Value,
    out_keys: Value,
    out_queries: Value,
    read: Value,
    passing: Value,
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
    out_token: Value,
    out_plane: Value,
    span: Value,
    CHUNK: constexpr,
    SIZE: constexpr,
    WIDTH: constexpr,
) -> None:
    """Write the share of ``span`` heads of a group in the gradients of ``b`` and ``c``.

    ``read`` gets, for each head and token, the gradient of what it reads of the state before the chunk; ``passing``
    that of the state before the chunk as a part of the state after it.
    """
    chunk, begin = tl.program_id(0), tl.program_id(1) * span
    group, part = begin // per, tl.program_id(1) % (per // span)
    first, left = chunk.to(tl.int64) * CHUNK, tokens - chunk * CHUNK
    source = queries + first * queries_token + group * queries_group
    query = load_block(source, queries_token, left, width, CHUNK, WIDTH)
    grad_query = tl.zeros((CHUNK, WIDTH), tl.float32)
    grad_key = tl.zeros((CHUNK, WIDTH), tl.float32)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    feature = tl.arange(0, SIZE)
    own = feature[:, None] == feature[None, :]
    for head in range(begin, begin + span):
        at = head * rows + place
        factor, kept_all = tl.load(reach + at), tl.load(kept + head * chunks + chunk)
        ending = tl.load(to_end + at) * tl.load(steps + at)
        grad_own = load_block(grad_y + (first * heads + head) * size, heads * size, left, size, CHUNK, SIZE)
        value = load_block(x + first * x_token + head * x_head, x_token, left, size, CHUNK, SIZE)
        matrix = (chunk.to(tl.int64) * heads + head) * size * width
        state = load_block(states + matrix, width, size, width, SIZE, WIDTH)
        grad_state = load_block(grad_states + matrix, width, size, width, SIZE, WIDTH)
        given = grad_own.to(tl.float32)
        grad_query = tl.dot((given * factor[:, None]).to(state.dtype), state, grad_query, input_precision="ieee")
        adding = (value.to(tl.float32) * ending[:, None]).to(state.dtype)
        grad_key = tl.dot(adding, grad_state, grad_key, input_precision="ieee")
        earlier = tl.dot(query, tl.trans(state), input_precision="ieee")
        tl.store(read + at, tl.sum(earlier * given, 1) * factor)
        # The tensor cores sum a row's products; of the other products nothing is taken.
        overlap = tl.dot(state, tl.trans(grad_state), input_precision="ieee")
        overlap = tl.sum(tl.where(own, overlap, 0.0))
        tl.store(passing + head * chunks + chunk, kept_all * overlap)
    pairs = load_block(
        grad_pairs + (chunk.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * CHUNK * CHUNK,
        *(CHUNK, CHUNK, CHUNK, CHUNK, CHUNK),
    )
    key = load_block(keys + first * keys_token + group * keys_group, keys_token, left, width, CHUNK, WIDTH)
    grad_query = tl.dot(tl.trans(pairs), key, grad_query, input_precision="ieee")
    grad_key = tl.dot(pairs, query, grad_key, input_precision="ieee")
    target = part.to(tl.int64) * out_plane + first * out_token + group * width
    store_block(out_keys + target, out_token, left, width, grad_key, CHUNK, WIDTH)
    store_block(out_queries + target, out_token, left, width, grad_query, CHUNK, WIDTH)
