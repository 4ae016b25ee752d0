"""Linear layer and cross entropy in one op, without all logits in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import lazy, serve_all, triton_why_not
from megalight.ops.cross_entropy import chunked, reference
from megalight.ops.cross_entropy.chunked import Combine, CrossEntropyKernels
from megalight.registry import Backend, BackendRegistry, remembered


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
_TORCH = CrossEntropyKernels(reference.statistics, reference.gradient_)
CROSS_ENTROPY.register(Backend("triton", partial(chunked.linear_cross_entropy, _TRITON), 20, _triton_why_not))
CROSS_ENTROPY.register(Backend("torch", partial(chunked.linear_cross_entropy, _TORCH), 10, serve_all))
CROSS_ENTROPY.register(Backend("reference", reference.linear_cross_entropy, 0, serve_all))


@remembered
def _choose(spec: CrossEntropySpec, backend: str) -> Callable[..., Tensor]:
    return CROSS_ENTROPY.select(spec, backend).fn


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
    fn = _choose(CrossEntropySpec(device, hidden.dtype), backend)
    return fn(hidden, weight, labels, bias, softcap, chunk, first_row, real, combine)
