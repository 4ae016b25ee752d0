"""Linear layer and cross entropy in one op, without all logits in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.batch_invariant import MODE, refuse, with_gradient_of
from megalight.ops.batch_invariant.cross_entropy import linear_losses
from megalight.ops.common import lazy, serve_all, triton_why_not, wide
from megalight.ops.cross_entropy import chunked
from megalight.ops.cross_entropy.chunked import Combine, CrossEntropyKernels
from megalight.registry import Backend, BackendRegistry, choose


def reference_linear_cross_entropy(
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


BLOCK = 1 << 24
"""Number of logits that are processed at once."""


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return ``softcap tanh(logits / softcap)``, in float32 or wider."""
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
        values = capped(logits[part, :real], softcap)
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
        values = capped(logits[part, :real], softcap)
        # softmax - one-hot. With the log-sum-exp of all ranks, each rank computes its columns without communication.
        slope = (values - logsumexp[part, None]).exp()
        inside = (labels[part] >= 0) & (labels[part] < real)
        slope.scatter_add_(1, labels[part].clamp(0, real - 1)[:, None], -inside[:, None].to(slope.dtype))
        slope.mul_(grad[part, None])
        if softcap is not None:
            # The derivative of c tanh(x / c) is 1 - tanh(x / c)^2, and `values` is c tanh(x / c).
            slope.mul_(1 - (values / softcap).square())
        logits[part, :real] = slope


class CrossEntropySpec(NamedTuple):
    """A request to the loss: device type, dtype of the hidden states."""

    device: str
    dtype: torch.dtype


CROSS_ENTROPY: BackendRegistry[CrossEntropySpec, Callable[..., Tensor]] = BackendRegistry("linear_cross_entropy")
REGISTRIES: tuple[BackendRegistry[CrossEntropySpec, Any], ...] = (CROSS_ENTROPY,)
EXAMPLE = CrossEntropySpec("cpu", torch.bfloat16)


def _triton_why_not(spec: CrossEntropySpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype)


_KERNELS = "megalight.ops.cross_entropy.triton"
_TRITON = CrossEntropyKernels(lazy(_KERNELS, "statistics"), lazy(_KERNELS, "gradient_"))
_TORCH = CrossEntropyKernels(statistics, gradient_)
CROSS_ENTROPY.register(Backend("triton", partial(chunked.linear_cross_entropy, _TRITON), 20, _triton_why_not))
CROSS_ENTROPY.register(Backend("torch", partial(chunked.linear_cross_entropy, _TORCH), 10, serve_all))
CROSS_ENTROPY.register(Backend("reference", reference_linear_cross_entropy, 0, serve_all))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    first_row: int = 0,
    num_rows: int | None = None,
    combine: Combine | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return ``-log softmax(hidden W^T + b)[label]`` of every token.

    Logits have the dtype of ``hidden`` (with sums in float32) and take up to 1/32 of the device's memory. Logits that
    fit are kept for the backward; others are computed again, a chunk of tokens at a time. If the weight or the bias has
    a main gradient, its gradient is added there once per chunk, as in :func:`megalight.ops.linear.linear`.

    Args:
        hidden: ``[T, h]``.
        weight: ``[V, h]``: rows ``first_row`` to ``first_row + V`` of the vocabulary.
        labels: ``[T]`` int64 rows of the vocabulary. Negative labels are ignored: loss 0, no gradient.
        bias: ``[V]``.
        softcap: logits become ``softcap * tanh(logit / softcap)`` (Gemma 2).
        chunk: tokens per chunk. None: as many as the memory allows.
        first_row: row of the vocabulary that is the first row of ``weight``.
        num_rows: number of real rows of the vocabulary; later rows are padding with probability 0. None: all rows.
        combine: ``(logsumexp [T], target_logit [T]) -> (logsumexp, target_logit)`` combines the results of several
            parts of the vocabulary. The target logit is 0 if another part has the label. The gradient of ``hidden`` is
            then only this part's term of a sum.
        backend: name of a backend.

    Returns:
        losses ``[T]`` in float32 (float64 for float64).
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    real = first_row + weight.shape[0] if num_rows is None else num_rows
    if MODE.on:
        if combine is not None or real != weight.shape[0]:
            refuse("losses over a divided vocabulary")

        def ordinary(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return linear_cross_entropy(hidden, weight, labels, bias=bias, softcap=softcap, backend=backend)

        def invariant(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return linear_losses(hidden, weight, labels, bias, softcap)

        return with_gradient_of(ordinary, invariant, (hidden, weight, bias))
    fn = choose(CROSS_ENTROPY, CrossEntropySpec(device, hidden.dtype), backend)
    return fn(hidden, weight, labels, bias, softcap, chunk, first_row, real, combine)
