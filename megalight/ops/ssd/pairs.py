"""The products of queries and keys of a chunk's tokens, which the heads of a group share."""

from __future__ import annotations

from megalight.ops.jit import Value, constexpr, jit, tl
from megalight.ops.ssd.blocks import load_block, seen_pairs, store_block


@jit
def multiply_pairs(
    keys: Value,
    queries: Value,
    positions: Value,
    out: Value,
    tokens: Value,
    width: Value,
    keys_token: Value,
    keys_group: Value,
    queries_token: Value,
    queries_group: Value,
    CHUNK: constexpr,
    WIDTH: constexpr,
) -> None:
    """Write ``c[i] b[j]`` of a chunk and a group, ``[i, j]``; 0 for later tokens ``j`` and other sequences."""
    chunk, group = tl.program_id(0), tl.program_id(1)
    first, left = chunk.to(tl.int64) * CHUNK, tokens - chunk * CHUNK
    source = queries + first * queries_token + group * queries_group
    query = load_block(source, queries_token, left, width, CHUNK, WIDTH)
    key = load_block(keys + first * keys_token + group * keys_group, keys_token, left, width, CHUNK, WIDTH)
    pairs = tl.dot(query, tl.trans(key), input_precision="ieee")
    pairs = tl.where(seen_pairs(positions, chunk * CHUNK, tokens, CHUNK), pairs, 0.0)
    target = out + (chunk.to(tl.int64) * tl.num_programs(1) + group) * CHUNK * CHUNK
    store_block(target, CHUNK, CHUNK, CHUNK, pairs, CHUNK, CHUNK)
