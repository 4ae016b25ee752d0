"""The row-wise parts of cross entropy in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.common import wide


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    logits = logits.to(wide(logits.dtype))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def statistics(logits: Tensor, labels: Tensor, real: int, softcap: float | None) -> tuple[Tensor, Tensor]:
    """``logsumexp`` over the first ``real`` columns of ``logits [T, V]``, and the label's logit.

    ``labels`` outside ``[0, real)`` have logit 0.
    """
    values = _capped(logits[:, :real], softcap)
    inside = (labels >= 0) & (labels < real)
    if real == 0:
        empty = values.new_zeros(values.shape[0])
        return empty - torch.inf, empty
    target = values.gather(1, labels.clamp(0, real - 1)[:, None])[:, 0]
    return values.logsumexp(-1), target.where(inside, torch.zeros_like(target))


def gradient_(
    logits: Tensor, labels: Tensor, logsumexp: Tensor, grad: Tensor, real: int, softcap: float | None
) -> None:
    """Turn ``logits [T, V]`` in place into the gradient of ``sum(grad * (logsumexp - target))``."""
    logits[:, real:] = 0
    values = _capped(logits[:, :real], softcap)
    slope = (values - logsumexp[:, None]).exp()
    if real:
        inside = (labels >= 0) & (labels < real)
        slope.scatter_add_(1, labels.clamp(0, real - 1)[:, None], -inside[:, None].to(slope.dtype))
    slope.mul_(grad[:, None])
    if softcap is not None:
        slope.mul_(1 - (values / softcap).square())
    logits[:, :real] = slope
