"""Gradients of a chunk's inputs, and of the products of its keys and queries."""

from __future__ import annotations

from megalight.ops.jit import Value, constexpr, jit, tl
from megalight.ops.ssd.blocks import bounded_decays, load_block, seen_pairs, store_block


@jit
def grad_inputs(
    x: Value,
    keys: Value,
    queries: Value,
    grad_y: Value,
    d: Value,
    positions: Value,
    steps: Value,
    totals: Value,
    to_end: Value,
    grad_states: Value,
    grad_x: Value,
    grad_pairs: Value,
    arriving: Value,
    leaving: Value,
    through: Value,
    skip: Value,
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
    grad_x_token: Value,
    span: Value,
    CHUNK: constexpr,
    SIZE: constexpr,
    WIDTH: constexpr,
) -> None:
    """Write the gradient of ``x`` for ``span`` heads of a group.

    ``grad_pairs`` gets these heads' share of the gradient of the products ``b c^T`` of pairs of tokens, the one that is
    read first. For each head and token, ``arriving`` gets the gradient of the logarithm of the decays to it;
    ``leaving`` that of the decays from it, and ``through`` that of what it adds to the state after the chunk, both
    divided by its step size; ``skip`` its share of the gradient of ``d``.

    Pairs stand with the token that is read first, so that their weights are multiplied from registers.
    """
    chunk, begin = tl.program_id(0), tl.program_id(1) * span
    group = begin // per
    first, left = chunk.to(tl.int64) * CHUNK, tokens - chunk * CHUNK
    source = queries + first * queries_token + group * queries_group
    query = load_block(source, queries_token, left, width, CHUNK, WIDTH)
    key = load_block(keys + first * keys_token + group * keys_group, keys_token, left, width, CHUNK, WIDTH)
    seen = tl.trans(seen_pairs(positions, chunk * CHUNK, tokens, CHUNK))
    weights = tl.where(seen, tl.dot(key, tl.trans(query), input_precision="ieee"), 0.0)
    shared = tl.zeros((CHUNK, CHUNK), tl.float32)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    own = place[:, None] == place[None, :]
    for head in range(begin, begin + span):
        at = head * rows + place
        total, step, ending = tl.load(totals + at), tl.load(steps + at), tl.load(to_end + at)
        factor = tl.load(d + head).to(tl.float32)
        value = load_block(x + first * x_token + head * x_head, x_token, left, size, CHUNK, SIZE)
        grad_own = load_block(grad_y + (first * heads + head) * size, heads * size, left, size, CHUNK, SIZE)
        state = load_block(
            grad_states + (chunk.to(tl.int64) * heads + head) * size * width, width, size, width, SIZE, WIDTH
        )
        # pairs of tokens of the chunk
        decay = bounded_decays(total[None, :], total[:, None])
        grad_decayed = tl.dot(value, tl.trans(grad_own), input_precision="ieee") * decay
        weight = (weights * decay).to(grad_own.dtype)
        shared += grad_decayed * step[:, None]
        both = weights * grad_decayed
        tl.store(leaving + at, tl.sum(both, 1))
        tl.store(arriving + at, tl.sum(both * step[:, None], 0))
        # The decay from a token to itself is 1: the diagonal holds the products of inputs and gradients.
        tl.store(skip + at, tl.sum(tl.where(own, grad_decayed, 0.0), 1))
        # through the state after the chunk
        later = tl.dot(key, tl.trans(state), input_precision="ieee") * ending[:, None]
        tl.store(through + at, tl.sum(later * value.to(tl.float32), 1))
        grad_value = tl.dot(weight, grad_own, later, input_precision="ieee") * step[:, None]
        grad_value += factor * grad_own.to(tl.float32)
        target = grad_x + first * grad_x_token + head * size
        store_block(target, grad_x_token, left, size, grad_value, CHUNK, SIZE)
    # The heads share keys and queries: their pairs are summed first, and multiplied once.
    store_block(
        grad_pairs + (chunk.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * CHUNK * CHUNK,
        *(CHUNK, CHUNK, CHUNK, tl.where(seen, shared, 0.0), CHUNK, CHUNK),
    )
