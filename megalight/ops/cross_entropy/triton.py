"""The row-wise parts of cross entropy: each reads the logits once, and the gradient writes them once."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl

# One program walks a whole row. Threads do not meet on the way, so small programs serve, many at a time.
STATISTICS_BLOCK = 2048
# Here blocks are independent, so one row is spread over several programs.
GRADIENT_BLOCK = 4096


@jit
def capped(x: Value, softcap: Value) -> Value:
    """Return ``softcap * tanh(x / softcap)``."""
    return softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)  # tanh(z) = 2 sigmoid(2 z) - 1


@jit
def _statistics(
    logits: Value, labels: Value, logsumexp: Value, target: Value, stride: Value,
    width: Value, real: Value, softcap: Value,
    CAPPED: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    # Eight neighbors, which one thread loads at once, share a maximum and a sum: threads need not meet before the end.
    group = 8 * tl.arange(0, BLOCK // 8)[:, None] + tl.arange(0, 8)[None, :]
    # Finite, so that the difference to a maximum of nothing is not NaN.
    largest = tl.full((BLOCK // 8,), -1e30, tl.float32)
    total = tl.zeros((BLOCK // 8,), tl.float32)
    for start in range(0, real, BLOCK):
        column = start + group
        x = tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32)
        if CAPPED:
            x = capped(x, softcap)
        # After the cap: capping -inf would give -softcap, which is a real probability.
        x = tl.where(column < real, x, float("-inf"))
        # Online softmax: rescale the sum whenever the maximum grows.
        larger = tl.maximum(largest, tl.max(x, 1))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger[:, None]), 1)
        largest = larger
    most = tl.max(largest, 0)
    tl.store(logsumexp + row, most + tl.log(tl.sum(total * tl.exp(largest - most), 0)))
    # The label's logit is read directly instead of searched for in every block.
    label = tl.load(labels + row)
    inside = (label >= 0) & (label < real)
    value = tl.load(logits + label, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        value = capped(value, softcap)
    tl.store(target + row, value)


@jit
def _gradient(
    logits: Value, labels: Value, logsumexp: Value, grad: Value, stride: Value,
    width: Value, real: Value, softcap: Value,
    CAPPED: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits += row * stride
    factor = tl.load(grad + row)
    label = tl.load(labels + row)
    x = tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32)
    if CAPPED:
        x = capped(x, softcap)
    # softmax - one-hot, with the log-sum-exp over all parts of the vocabulary.
    slope = tl.exp(x - tl.load(logsumexp + row)) - tl.where(column == label, 1.0, 0.0)
    if CAPPED:
        slope *= 1.0 - (x / softcap) * (x / softcap)
    # A select, not a product: exp() of arbitrary padding may be infinite, and 0 * inf is NaN.
    slope = tl.where(column < real, slope * factor, 0.0)
    tl.store(logits + column, slope.to(logits.dtype.element_ty), mask=column < width)


def row_width(logits: Tensor, columns: int) -> int:
    """Return ``columns`` rounded up to 16, at most a row, for vector loads. What is read beyond is masked later."""
    # Triton specializes integers that are multiples of 16: loads with such a bound are vectorized.
    return min(logits.stride(0), -(-columns // 16) * 16)


def statistics(logits: Tensor, labels: Tensor, real: int, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return ``logsumexp`` over the first ``real`` columns of ``logits [T, V]``, and the logit of the label, or 0."""
    tokens = logits.shape[0]
    logsumexp = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    target = torch.empty_like(logsumexp)
    block = min(STATISTICS_BLOCK, next_power(max(real, 16)))
    _statistics[(tokens,)](
        logits, labels, logsumexp, target, logits.stride(0), row_width(logits, real), real,
        1.0 if softcap is None else softcap,
        CAPPED=softcap is not None, BLOCK=block, num_warps=max(4, block // 512),
    )  # fmt: skip
    return logsumexp, target


def gradient_(
    logits: Tensor, labels: Tensor, logsumexp: Tensor, grad: Tensor, real: int, softcap: float | None
) -> None:
    """Overwrite ``logits [T, V]`` with the gradient of ``sum(grad * (logsumexp - target))``.

    Padding between rows (``logits.stride(0) > V``) may be overwritten.
    """
    tokens, size = logits.shape
    block = min(GRADIENT_BLOCK, next_power(size))
    _gradient[(tokens, cdiv(size, block))](
        logits, labels, logsumexp, grad, logits.stride(0), row_width(logits, size), real,
        1.0 if softcap is None else softcap,
        CAPPED=softcap is not None, BLOCK=block, num_warps=max(4, block // 512),
    )  # fmt: skip
