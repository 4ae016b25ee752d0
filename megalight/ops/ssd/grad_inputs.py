"""Gradients of a chunk's inputs and keys, from its tokens and the gradients of the states after it."""

from __future__ import annotations

from megalight.ops.jit import Value, constexpr, jit, tl
from megalight.ops.ssd.blocks import bounded_decays, load_block, seen_pairs, store_block


@jit
def grad_keys(
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
    pairs: Value,
    grad_x: Value,
    out: Value,
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
    out_token: Value,
    out_plane: Value,
    span: Value,
    CHUNK: constexpr,
    SIZE: constexpr,
    WIDTH: constexpr,
) -> None:
    """Write the gradient of ``x`` for ``span`` heads of a group, and these heads' share of that of ``b``.

    ``grad_pairs`` gets these heads' share of the gradient of the products ``c b^T`` of pairs of tokens. For each head
    and token, ``arriving`` gets the gradient of the logarithm of the decays to it; ``leaving`` that of the decays from
    it, and ``through`` that of what it adds to the state after the chunk, both divided by its step size. ``skip`` is
    the chunk's share of the gradient of ``d``.
    """
    chunk, begin = tl.program_id(0), tl.program_id(1) * span
    group, part = begin // per, tl.program_id(1) % (per // span)
    first, left = chunk.to(tl.int64) * CHUNK, tokens - chunk * CHUNK
    source = queries + first * queries_token + group * queries_group
    query = load_block(source, queries_token, left, width, CHUNK, WIDTH)
    key = load_block(keys + first * keys_token + group * keys_group, keys_token, left, width, CHUNK, WIDTH)
    # from memory: as a product of this program's, their layout would be that of chained products
    source = pairs + (chunk.to(tl.int64) * (heads // per) + group) * CHUNK * CHUNK
    weights = load_block(source, CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
    shared = tl.zeros((CHUNK, CHUNK), tl.float32)
    grad_key = tl.zeros((CHUNK, WIDTH), tl.float32)
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
        given, grad_given = value.to(tl.float32), grad_own.to(tl.float32)
        # through the state after the chunk
        adding = (given * (ending * step)[:, None]).to(value.dtype)
        grad_key = tl.dot(adding, state, grad_key, input_precision="ieee")
        later = tl.dot(key, tl.trans(state), input_precision="ieee") * ending[:, None]
        # pairs of tokens of the chunk
        decay = bounded_decays(total)
        grad_decayed = tl.dot(grad_own, tl.trans(value), input_precision="ieee") * decay
        shared += grad_decayed * step[None, :]
        both = weights * grad_decayed
        weight = (weights * decay).to(grad_own.dtype)
        grad_value = tl.dot(tl.trans(weight), grad_own, input_precision="ieee") * step[:, None]
        grad_value += later * step[:, None] + factor * grad_given
        target = grad_x + first * grad_x_token + head * size
        store_block(target, grad_x_token, left, size, grad_value, CHUNK, SIZE)
        tl.store(arriving + at, tl.sum(both * step[None, :], 1))
        tl.store(leaving + at, tl.sum(both, 0))
        tl.store(through + at, tl.sum(later * given, 1))
        # The decay from a token to itself is 1: the diagonal holds the products of inputs and gradients.
        tl.store(skip + chunk * heads + head, tl.sum(tl.where(own, grad_decayed, 0.0)))
    # The heads share keys and queries: their pairs are summed first, and multiplied once.
    shared = tl.where(seen_pairs(positions, chunk * CHUNK, tokens, CHUNK), shared, 0.0).to(key.dtype)
    store_block(
        grad_pairs + (chunk.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * CHUNK * CHUNK,
        *(CHUNK, CHUNK, CHUNK, shared, CHUNK, CHUNK),
    )
    grad_key = tl.dot(tl.trans(shared), query, grad_key, input_precision="ieee")
    target = out + part.to(tl.int64) * out_plane + first * out_token + group * width
    store_block(target, out_token, left, width, grad_key, CHUNK, WIDTH)
