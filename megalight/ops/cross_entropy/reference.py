"""Linear layer and cross entropy with all logits in float32 or wider. It takes much memory; tests use it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalight.ops.common import wide

Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    chunk: int | None,
    first_row: int,
    num_rows: int,
    combine: Combine | None,
) -> Tensor:
    """Return ``logsumexp(logits) - logits[label]`` per token; 0 if the label is negative.

    With ``combine``, only values are right, not gradients.
    """
    dtype = wide(hidden.dtype)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    real = max(0, min(weight.shape[0], num_rows - first_row))
    # Columns of padding are cut off before the sum.
    logits = logits[:, :real]
    local = labels - first_row
    inside = (local >= 0) & (local < real)
    target = torch.zeros_like(logits[:, 0]) if real == 0 else logits.gather(1, local.clamp(0, real - 1)[:, None])[:, 0]
    target = target.where(inside, torch.zeros_like(target))
    logsumexp = logits.logsumexp(-1)
    if combine is not None:
        logsumexp, target = combine(logsumexp, target)
    return (logsumexp - target).masked_fill(labels < 0, 0.0)
