"""What the kernels of the scan share: loads of a block of rows, and decays between the tokens of a chunk."""

from __future__ import annotations

from megalight.ops.jit import Value, constexpr, jit, tl


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
