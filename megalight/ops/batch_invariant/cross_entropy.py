"""Log-probabilities in batch-invariant mode: those of sampled tokens, and the losses of a training forward."""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.batch_invariant import rowwise
from megalight.ops.batch_invariant.matmul import product
from megalight.ops.common import lazy, wide
from megalight.ops.quantized_weight import readable

LOGITS = 1 << 28
"""Number of logits that are in memory at once."""


kernel_log_sum_exp = lazy("megalight.ops.batch_invariant.triton", "log_sum_exp")


def log_sum_exp(logits: Tensor) -> Tensor:
    """``[n, V] -> [n]``, in float32 or wider."""
    found: Tensor
    if logits.device.type == "cpu":
        found = rowwise(lambda row: row.to(wide(row.dtype)).logsumexp(-1), logits)
    else:
        found = kernel_log_sum_exp(logits)
    return found


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Return ``softcap * tanh(logits / softcap)``, in float32 or wider."""
    found: Tensor = rowwise(lambda rows: softcap * torch.tanh(rows.to(wide(rows.dtype)) / softcap), logits)
    return found


def linear_losses(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """Return ``-log softmax(hidden W^T + b)[label]`` ``[T]``; 0 where the label is negative."""
    weight = readable(weight).to(hidden.dtype)
    step = max(1, LOGITS // weight.shape[0])
    losses = []
    for start in range(0, max(1, len(hidden)), step):
        part = slice(start, start + step)
        logits = product(hidden[part], weight, bias)
        logits = logits if softcap is None else capped(logits, softcap)
        chosen = logits.gather(1, labels[part].clamp(min=0)[:, None])[:, 0]
        total = log_sum_exp(logits)
        losses.append((total - chosen.to(total.dtype)).masked_fill(labels[part] < 0, 0.0))
    return torch.cat(losses)
