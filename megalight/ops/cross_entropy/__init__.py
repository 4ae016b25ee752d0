"""Cross entropy of a linear layer's output, without ever holding that output in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import lazy, serve_all, triton_why_not
from megalight.ops.cross_entropy import chunked, native, reference
from megalight.ops.cross_entropy.chunked import Combine, Rows
from megalight.registry import Backend, BackendRegistry, remembered


class Spec(NamedTuple):
    """What a loss must serve: device type, and type of the hidden states."""

    device: str
    dtype: torch.dtype


CROSS_ENTROPY: BackendRegistry[Spec, Callable[..., Tensor]] = BackendRegistry("linear_cross_entropy")
REGISTRIES: tuple[BackendRegistry[Spec, Any], ...] = (CROSS_ENTROPY,)
EXAMPLE = Spec("cpu", torch.bfloat16)


def _triton_why_not(spec: Spec) -> str | None:
    return triton_why_not(spec.device, spec.dtype)


_KERNELS = "megalight.ops.cross_entropy.triton"
_TRITON = Rows(lazy(_KERNELS, "statistics"), lazy(_KERNELS, "gradient_"))
_TORCH = Rows(native.statistics, native.gradient_)
CROSS_ENTROPY.register(Backend("triton", partial(chunked.linear_cross_entropy, _TRITON), 20, _triton_why_not))
CROSS_ENTROPY.register(Backend("torch", partial(chunked.linear_cross_entropy, _TORCH), 10, serve_all))
CROSS_ENTROPY.register(Backend("reference", reference.linear_cross_entropy, 0, serve_all))


@remembered
def _choose(spec: Spec, backend: str) -> Callable[..., Tensor]:
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
    """``-log softmax(hidden W^T + b)[label]`` of every token.

    Logits are formed in the type of ``hidden`` (sums in float32). They take up to 1/32 of the device's memory: those
    that fit are kept for the backward, others are formed again, a chunk of tokens at a time. Gradients of a weight or
    bias with a main gradient are added there, as in :func:`megalight.ops.linear.linear`, once per chunk.

    Args:
        hidden: ``[T, h]``.
        weight: ``[V, h]``: rows ``first_row`` to ``first_row + V`` of a table.
        labels: ``[T]`` int64 rows of the table; negative ones are ignored: loss 0, no gradient.
        bias: ``[V]``.
        softcap: logits become ``softcap * tanh(logit / softcap)`` (Gemma 2).
        chunk: tokens per chunk; chosen by memory when None.
        first_row: table row of the weight's first row.
        num_rows: rows of the table that are real; later ones are padding and have no probability. All when None.
        combine: ``(logsumexp [T], target_logit [T]) -> (logsumexp, target_logit)`` joins the results of several parts
            of the table (a target that another part holds counts 0 here). The gradient of ``hidden`` is then this
            part's share of a sum.
        backend: a backend's name.

    Returns:
        losses ``[T]``, float32 (float64 for float64).
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    real = first_row + weight.shape[0] if num_rows is None else num_rows
    fn = _choose(Spec(device, hidden.dtype), backend)
    return fn(hidden, weight, labels, bias, softcap, chunk, first_row, real, combine)
