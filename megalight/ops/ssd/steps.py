"""The decays of all chunks, from the step sizes."""

from __future__ import annotations

from megalight.ops.jit import Value, constexpr, jit, tl


@jit
def decays(
    dt: Value,
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
    tl.store(totals + target, total, mask=within)
    tl.store(reach + target, tl.where(crossing, tl.exp(total), 0.0), mask=within)
    remaining = tl.minimum(whole[None, :] - total, 0.0)
    tl.store(to_end + target, tl.where(ending, tl.exp(remaining), 0.0), mask=within)
    tl.store(kept + head * chunks + chunk, tl.where(final < first, tl.exp(whole), 0.0), mask=head < heads)


@jit
def grad_decays(
    a: Value,
    steps: Value,
    arriving: Value,
    leaving: Value,
    through: Value,
    read: Value,
    passing: Value,
    grad_dt: Value,
    grad_a: Value,
    tokens: Value,
    rows: Value,
    chunks: Value,
    heads: Value,
    CHUNK: constexpr,
    HEADS: constexpr,
) -> None:
    """Write the gradient of the step sizes of a chunk, for some heads, and the chunk's share of that of ``a``.

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
    grad_step = left + given + grad * rate[None, :]
    target = grad_dt + token.to(tl.int64)[:, None] * heads + head[None, :]
    tl.store(target, grad_step.to(grad_dt.dtype.element_ty), mask=(token < tokens)[:, None] & known[None, :])
    tl.store(grad_a + chunk * heads + head, tl.sum(grad * step, 0), mask=known)
