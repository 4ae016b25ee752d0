"""The decays of all chunks, from the step sizes."""

from __future__ import annotations

from megalight.ops.jit import LOG2E, Value, constexpr, jit, tl


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
    dt: Value,
    bias: Value,
    a: Value,
    positions: Value,
    steps: Value,
    totals: Value,
    reach: Value,
    to_end: Value,
    kept: Value,
    tokens: Value,
    rows: Value,
    chunks: Value,
    heads: Value,
    dt_token: Value,
    dt_head: Value,
    BIAS: constexpr,
    CHUNK: constexpr,
    HEADS: constexpr,
) -> None:
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
    dt: Value,
    bias: Value,
    a: Value,
    steps: Value,
    arriving: Value,
    leaving: Value,
    through: Value,
    read: Value,
    passing: Value,
    skip: Value,
    grad_dt: Value,
    grad_a: Value,
    grad_d: Value,
    grad_bias: Value,
    tokens: Value,
    rows: Value,
    chunks: Value,
    heads: Value,
    dt_token: Value,
    dt_head: Value,
    grad_token: Value,
    BIAS: constexpr,
    CHUNK: constexpr,
    HEADS: constexpr,
) -> None:
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
