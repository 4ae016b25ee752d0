"""SSD kernels (Mamba-2): decays, states between chunks, outputs, gradients, in the order in which a pass runs them."""

from __future__ import annotations

from megalight.ops.jit import LOG2E, Value, constexpr, jit, tl


@jit
def load_block(pointer: Value, stride: Value, rows: Value, width: Value, ROWS: constexpr, WIDTH: constexpr) -> Value:
    """Load ``[ROWS, WIDTH]``, whose rows lie ``stride`` apart; 0 at and after ``rows`` and ``width``."""
    row, feature = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (feature < width)[None, :]
    return tl.load(pointer + row[:, None] * stride + feature[None, :], mask=inside, other=0.0)


@jit
def store_block(
    pointer: Value, stride: Value, rows: Value, width: Value, values: Value, ROWS: constexpr, WIDTH: constexpr
) -> None:
    """Store ``[ROWS, WIDTH]`` as :func:`load_block` loads it, in the dtype of ``pointer``."""
    row, feature = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (feature < width)[None, :]
    target = pointer + row[:, None] * stride + feature[None, :]
    tl.store(target, values.to(pointer.dtype.element_ty), mask=inside)


@jit
def seen_pairs(positions: Value, first: Value, tokens: Value, CHUNK: constexpr) -> Value:
    """Return which pairs ``[i, j]`` of tokens of a chunk are of one sequence, ``j`` not later than ``i``."""
    token = first + tl.arange(0, CHUNK)
    start = token - tl.load(positions + token, mask=token < tokens, other=0).to(tl.int32)
    return (token[:, None] >= token[None, :]) & (start[:, None] == start[None, :])


@jit
def bounded_decays(to: Value, since: Value) -> Value:
    """Return the decays between tokens of a chunk from the binary logarithms of those since its beginning; at most 1.

    ``to`` and ``since`` are ``[CHUNK]`` along one axis each: ``total[:, None]`` and ``total[None, :]`` give ``[i, j]``,
    the decay from token ``j`` to token ``i``.
    """
    # The difference of later tokens is positive, and its power may overflow.
    return tl.exp2(tl.minimum(to - since, 0.0))


@jit
def softplus(x: Value) -> Value:
    """Return ``log(1 + exp(x))`` with the digits of small results."""
    power = tl.exp(tl.minimum(x, 20.0))
    # 1 + power has lost the digits of a small power: the series of 2 artanh(ratio) instead, to ratio^9 / 9
    ratio = power / (2.0 + power)
    square = ratio * ratio
    series = 2.0 * ratio * (1.0 + square * (1.0 / 3 + square * (0.2 + square * (1.0 / 7))))
    return tl.where(x > 20.0, x, tl.where(power < 0.5, series, tl.log(1.0 + power)))


@jit
def decays(
    dt: Value, bias: Value, a: Value, positions: Value, steps: Value, totals: Value, reach: Value, to_end: Value,
    kept: Value,
    tokens: Value, rows: Value, chunks: Value, heads: Value, dt_token: Value, dt_head: Value,
    BIAS: constexpr, CHUNK: constexpr, HEADS: constexpr,
) -> None:  # fmt: skip
    """Write what :class:`~megalight.ops.ssd.triton.Chunks` holds of a chunk, for some heads."""
    chunk = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    first = chunk * CHUNK
    token = first + tl.arange(0, CHUNK)
    given = token < tokens
    inside = given[:, None] & (head < heads)[None, :]
    place = token.to(tl.int64)[:, None] * dt_token + head[None, :] * dt_head
    step = tl.load(dt + place, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        step = softplus(step + tl.load(bias + head, mask=head < heads, other=0.0).to(tl.float32)[None, :])
        step = tl.where(inside, step, 0.0)
    rate = tl.load(a + head, mask=head < heads, other=0.0).to(tl.float32)
    change = step * rate[None, :]
    total = tl.cumsum(change, 0)
    # the last token's: a scan has no last element to take
    whole = tl.sum(change, 0)
    start = token - tl.load(positions + token, mask=given, other=0).to(tl.int32)
    # Tokens after the last are sequences of their own; nothing reads the state after them.
    end = first + CHUNK - 1
    final = end - tl.load(positions + end, mask=end < tokens, other=0).to(tl.int32)
    crossing, ending = (start < first)[:, None], (start == final)[:, None]
    target = head.to(tl.int64)[None, :] * rows + token[:, None]
    within = (token < rows)[:, None] & (head < heads)[None, :]
    tl.store(steps + target, step, mask=within)
    tl.store(totals + target, total * LOG2E, mask=within)
    tl.store(reach + target, tl.where(crossing, tl.exp(total), 0.0), mask=within)
    remaining = tl.minimum(whole[None, :] - total, 0.0)
    tl.store(to_end + target, tl.where(ending, tl.exp(remaining), 0.0), mask=within)
    tl.store(kept + head * chunks + chunk, tl.where(final < first, tl.exp(whole), 0.0), mask=head < heads)


@jit
def grad_decays(
    dt: Value, bias: Value, a: Value, steps: Value, arriving: Value, leaving: Value, through: Value, read: Value,
    passing: Value, skip: Value, grad_dt: Value, grad_a: Value, grad_d: Value, grad_bias: Value,
    tokens: Value, rows: Value, chunks: Value, heads: Value, dt_token: Value, dt_head: Value, grad_token: Value,
    BIAS: constexpr, CHUNK: constexpr, HEADS: constexpr,
) -> None:  # fmt: skip
    """Write the gradient of ``dt`` of a chunk, for some heads, and its share of those of ``a``, ``d`` and ``bias``.

    A token's decay is in every pair of an earlier token and one that is not earlier than itself.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    known = head < heads
    within = (token < rows)[:, None] & known[None, :]
    place = head.to(tl.int64)[None, :] * rows + token[:, None]
    step = tl.load(steps + place, mask=within, other=0.0)
    left = tl.load(leaving + place, mask=within, other=0.0)
    given = tl.load(through + place, mask=within, other=0.0)
    ends = tl.load(arriving + place, mask=within, other=0.0) + tl.load(read + place, mask=within, other=0.0)
    ends, begins = ends - left * step, given * step
    grad = tl.cumsum(ends, 0, reverse=True) + tl.cumsum(begins, 0) - begins
    grad += tl.load(passing + head * chunks + chunk, mask=known, other=0.0)[None, :]
    rate = tl.load(a + head, mask=known, other=0.0).to(tl.float32)
    tl.store(grad_a + chunk * heads + head, tl.sum(grad * step, 0), mask=known)
    skipped = tl.load(skip + place, mask=within, other=0.0)
    tl.store(grad_d + chunk * heads + head, tl.sum(skipped, 0), mask=known)
    grad_step = left + given + grad * rate[None, :]
    inside = (token < tokens)[:, None] & known[None, :]
    if BIAS:
        source = dt + token.to(tl.int64)[:, None] * dt_token + head[None, :] * dt_head
        before = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        before += tl.load(bias + head, mask=known, other=0.0).to(tl.float32)[None, :]
        grad_step = tl.where(inside, grad_step * tl.sigmoid(before), 0.0)
        tl.store(grad_bias + chunk * heads + head, tl.sum(grad_step, 0), mask=known)
    target = grad_dt + token.to(tl.int64)[:, None] * grad_token + head[None, :]
    tl.store(target, grad_step.to(grad_dt.dtype.element_ty), mask=inside)


@jit
def _pass(
    x: Value, keys: Value, weights: Value, steps: Value, kept: Value, out: Value,
    tokens: Value, rows: Value, chunks: Value, heads: Value, per: Value, size: Value, width: Value, x_token: Value,
    x_head: Value, keys_token: Value, keys_group: Value,
    BACK: constexpr, CHUNK: constexpr, SIZE: constexpr, PART: constexpr,
) -> None:  # fmt: skip
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
    x: Value, keys: Value, grad_y: Value, queries: Value, to_end: Value, reach: Value, steps: Value, kept: Value,
    states: Value, grad_states: Value,
    tokens: Value, rows: Value, chunks: Value, heads: Value, per: Value, size: Value, width: Value, x_token: Value,
    x_head: Value, keys_token: Value, keys_group: Value, queries_token: Value, queries_group: Value,
    BOTH: constexpr, CHUNK: constexpr, SIZE: constexpr, PART: constexpr,
) -> None:  # fmt: skip
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


@jit
def outputs(
    x: Value, keys: Value, queries: Value, d: Value, positions: Value, steps: Value, totals: Value, reach: Value,
    states: Value, y: Value,
    tokens: Value, rows: Value, heads: Value, per: Value, size: Value, width: Value, x_token: Value, x_head: Value,
    keys_token: Value, keys_group: Value, queries_token: Value, queries_group: Value, span: Value,
    CHUNK: constexpr, SIZE: constexpr, WIDTH: constexpr,
) -> None:  # fmt: skip
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


@jit
def grad_inputs(
    x: Value, keys: Value, queries: Value, grad_y: Value, d: Value, positions: Value, steps: Value, totals: Value,
    to_end: Value, grad_states: Value, grad_x: Value, grad_pairs: Value, arriving: Value, leaving: Value,
    through: Value, skip: Value,
    tokens: Value, rows: Value, heads: Value, per: Value, size: Value, width: Value, x_token: Value, x_head: Value,
    keys_token: Value, keys_group: Value, queries_token: Value, queries_group: Value, grad_x_token: Value, span: Value,
    CHUNK: constexpr, SIZE: constexpr, WIDTH: constexpr,
) -> None:  # fmt: skip
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


@jit
def grad_shared(
    x: Value, keys: Value, queries: Value, grad_y: Value, steps: Value, reach: Value, to_end: Value, kept: Value,
    states: Value, grad_states: Value, grad_pairs: Value, out_keys: Value, out_queries: Value, read: Value,
    passing: Value,
    tokens: Value, rows: Value, chunks: Value, heads: Value, per: Value, size: Value, width: Value, x_token: Value,
    x_head: Value, keys_token: Value, keys_group: Value, queries_token: Value, queries_group: Value, out_token: Value,
    out_plane: Value, span: Value,
    CHUNK: constexpr, SIZE: constexpr, WIDTH: constexpr,
) -> None:  # fmt: skip
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
