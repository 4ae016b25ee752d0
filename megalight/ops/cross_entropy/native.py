"""The row-wise parts of cross entropy in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.common import wide

BLOCK = 1 << 24
"""Number of logits that are processed at once."""


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    logits = logits.to(wide(logits.dtype))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def blocks(logits: Tensor) -> list[slice]:
    """Return slices of a few rows: intermediate results have a wider dtype and several copies in memory."""
    step = max(1, BLOCK // max(1, logits.shape[1]))
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


def statistics(logits: Tensor, labels: Tensor, real: int, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return ``logsumexp`` over the first ``real`` columns of ``logits [T, V]``, and the logit of the label.

    The logit of labels outside ``[0, real)`` is 0.
    """
    # If this rank holds padding only, its part of the vocabulary has probability 0: a log-sum-exp of -inf.
    logsumexp = torch.full(labels.shape, -torch.inf, dtype=wide(logits.dtype), device=logits.device)
    target = torch.zeros_like(logsumexp)
    for part in blocks(logits) if real else ():
        # Labels outside this part of the vocabulary are clamped for `gather`, which checks bounds, and masked
        # afterwards.
        values = _capped(logits[part, :real], softcap)
        inside = (labels[part] >= 0) & (labels[part] < real)
        logsumexp[part] = values.logsumexp(-1)
        target[part] = values.gather(1, labels[part].clamp(0, real - 1)[:, None])[:, 0].where(inside, target[part])
    return logsumexp, target


def gradient_(
    logits: Tensor, labels: Tensor, logsumexp: Tensor, grad: Tensor, real: int, softcap: float | None
) -> None:
    """Overwrite ``logits [T, V]`` with the gradient of ``sum(grad * (logsumexp - target))``."""
    # Padding has no gradient. (Its logits are arbitrary, so exp() of them could be infinite.)
    logits[:, real:] = 0
    for part in blocks(logits) if real else ():
        values = _capped(logits[part, :real], softcap)
        # softmax - one-hot. With the log-sum-exp of all ranks, each rank computes its columns without communication.
        slope = (values - logsumexp[part, None]).exp()
        inside = (labels[part] >= 0) & (labels[part] < real)
        slope.scatter_add_(1, labels[part].clamp(0, real - 1)[:, None], -inside[:, None].to(slope.dtype))
        slope.mul_(grad[part, None])
        if softcap is not None:
            # The derivative of c tanh(x / c) is 1 - tanh(x / c)^2, and `values` is c tanh(x / c).
            slope.mul_(1 - (values / softcap).square())
        logits[part, :real] = slope
