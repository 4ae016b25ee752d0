"""What the Triton kernels of recurrent mixers share: loads of a chunk of tokens, and decays between them."""

from __future__ import annotations

from megalight.ops.jit import Value, constexpr, jit, tl


@jit
def load_rows(pointer: Value, stride: Value, token: Value, tokens: Value, width: Value, BLOCK: constexpr) -> Value:
    """Load ``[ROWS, BLOCK]`` of consecutive features; 0 outside of ``tokens`` and ``width``."""
    feature = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (feature < width)[None, :]
    return tl.load(pointer + token.to(tl.int64)[:, None] * stride + feature[None, :], mask=inside, other=0.0)


@jit
def decays(total_i: Value, total_j: Value, start_i: Value, start_j: Value, i: Value, j: Value) -> Value:
    """Return the decay from token ``j`` to token ``i``, ``[i, j]``; 0 for later tokens and other sequences."""
    seen = (i[:, None] >= j[None, :]) & (start_i[:, None] == start_j[None, :])
    # Masked before the exponential: the difference of later tokens is positive, and may overflow.
    return tl.exp(tl.where(seen, total_i[:, None] - total_j[None, :], float("-inf")))
