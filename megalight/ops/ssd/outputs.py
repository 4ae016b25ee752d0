"""The outputs of a chunk, from its tokens and from the states before it."""

from __future__ import annotations

from megalight.ops.jit import Value, constexpr, jit, tl
from megalight.ops.ssd.blocks import bounded_decays, load_block, seen_pairs, store_block


@jit
def outputs(
    x: Value,
    keys: Value,
    queries: Value,
    d: Value,
    positions: Value,
    steps: Value,
    totals: Value,
    reach: Value,
    states: Value,
    y: Value,
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
    span: Value,
    CHUNK: constexpr,
    SIZE: constexpr,
    WIDTH: constexpr,
) -> None:
    """Write ``y`` of a chunk, for ``span`` heads of a group: they share the products of queries and keys."""
    chunk, begin = tl.program_id(0), tl.program_id(1) * span
    group = begin // per
    first, left = chunk.to(tl.int64) * CHUNK, tokens - chunk * CHUNK
    query = load_block(
        queries + first * queries_token + group * queries_group, queries_token, left, width, CHUNK, WIDTH
    )
    key = load_block(keys + first * keys_token + group * keys_group, keys_token, left, width, CHUNK, WIDTH)
    pairs = tl.dot(query, tl.trans(key), input_precision="ieee")
    pairs = tl.where(seen_pairs(positions, chunk * CHUNK, tokens, CHUNK), pairs, 0.0)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    for head in range(begin, begin + span):
        value = load_block(x + first * x_token + head * x_head, x_token, left, size, CHUNK, SIZE)
        state = load_block(states + (chunk.to(tl.int64) * heads + head) * size * width, width, size, width, SIZE, WIDTH)
        total, step = tl.load(totals + head * rows + place), tl.load(steps + head * rows + place)
        read, factor = tl.load(reach + head * rows + place), tl.load(d + head).to(tl.float32)
        out = tl.dot(query, tl.trans(state), input_precision="ieee") * read[:, None]
        weight = pairs * bounded_decays(total[:, None], total[None, :]) * step[None, :]
        out = tl.dot(weight.to(value.dtype), value, out, input_precision="ieee")
        out += factor * value.to(tl.float32)
        store_block(y + (first * heads + head) * size, heads * size, left, size, out, CHUNK, SIZE)
