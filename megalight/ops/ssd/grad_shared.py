"""Gradients of a chunk's queries, from the states before it."""

from __future__ import annotations

from megalight.ops.jit import Value, constexpr, jit, tl
from megalight.ops.ssd.blocks import load_block, store_block


@jit
def grad_queries(
    keys: Value,
    queries: Value,
    grad_y: Value,
    reach: Value,
    kept: Value,
    states: Value,
    grad_states: Value,
    grad_pairs: Value,
    out: Value,
    read: Value,
    passing: Value,
    tokens: Value,
    rows: Value,
    chunks: Value,
    heads: Value,
    per: Value,
    size: Value,
    width: Value,
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
    """Write the share of ``span`` heads of a group in the gradient of ``c``.

    ``read`` gets, for each head and token, the gradient of what it reads of the state before the chunk; ``passing``
    that of the state before the chunk as a part of the state after it.
    """
    chunk, begin = tl.program_id(0), tl.program_id(1) * span
    group, part = begin // per, tl.program_id(1) % (per // span)
    first, left = chunk.to(tl.int64) * CHUNK, tokens - chunk * CHUNK
    source = queries + first * queries_token + group * queries_group
    query = load_block(source, queries_token, left, width, CHUNK, WIDTH)
    grad_query = tl.zeros((CHUNK, WIDTH), tl.float32)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    for head in range(begin, begin + span):
        factor, kept_all = tl.load(reach + head * rows + place), tl.load(kept + head * chunks + chunk)
        grad_own = load_block(grad_y + (first * heads + head) * size, heads * size, left, size, CHUNK, SIZE)
        matrix = (chunk.to(tl.int64) * heads + head) * size * width
        state = load_block(states + matrix, width, size, width, SIZE, WIDTH)
        grad_state = load_block(grad_states + matrix, width, size, width, SIZE, WIDTH)
        given = grad_own.to(tl.float32)
        grad_query = tl.dot((given * factor[:, None]).to(state.dtype), state, grad_query, input_precision="ieee")
        earlier = tl.dot(query, tl.trans(state), input_precision="ieee")
        tl.store(read + head * rows + place, tl.sum(earlier * given, 1) * factor)
        overlap = tl.sum(state.to(tl.float32) * grad_state.to(tl.float32))
        tl.store(passing + head * chunks + chunk, kept_all * overlap)
    pairs = load_block(
        grad_pairs + (chunk.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * CHUNK * CHUNK,
        *(CHUNK, CHUNK, CHUNK, CHUNK, CHUNK),
    )
    key = load_block(keys + first * keys_token + group * keys_group, keys_token, left, width, CHUNK, WIDTH)
    grad_query = tl.dot(pairs, key, grad_query, input_precision="ieee")
    target = out + part.to(tl.int64) * out_plane + first * out_token + group * width
    store_block(target, out_token, left, width, grad_query, CHUNK, WIDTH)
