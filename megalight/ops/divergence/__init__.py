"""Two linear layers and the divergence of their softmaxes in one op, without all logits in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.batch_invariant import refuse
from megalight.ops.common import lazy, serve_all, triton_why_not
from megalight.ops.cross_entropy import Combine
from megalight.ops.divergence import chunked, top_k
from megalight.ops.divergence.spec import KINDS as KINDS
from megalight.ops.divergence.spec import DivergenceKernels, Measure
from megalight.ops.divergence.spec import Projection as Projection
from megalight.registry import Backend, BackendRegistry, choose
from megalight.types import TopTokens

TOP_KINDS = ("forward_kl", "cross_entropy")
"""Divergences from stored tokens. Others would need the teacher's distribution inside the bucket."""


class DivergenceSpec(NamedTuple):
    """A request to the divergence: device type, dtypes of the student's and of the teacher's hidden states."""

    device: str
    dtype: torch.dtype
    teacher_dtype: torch.dtype


DIVERGENCE: BackendRegistry[DivergenceSpec, Callable[..., tuple[Tensor, Tensor | None]]] = BackendRegistry(
    "linear_divergence"
)
REGISTRIES: tuple[BackendRegistry[DivergenceSpec, Any], ...] = (DIVERGENCE,)
EXAMPLE = DivergenceSpec("cpu", torch.bfloat16, torch.bfloat16)


def _triton_why_not(spec: DivergenceSpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype, spec.teacher_dtype)


_KERNELS = "megalight.ops.divergence.triton"
_TRITON = DivergenceKernels(lazy(_KERNELS, "statistics"), lazy(_KERNELS, "sums"), lazy(_KERNELS, "gradient_"))
_TORCH = DivergenceKernels(chunked.statistics, chunked.sums, chunked.gradient_)
DIVERGENCE.register(Backend("triton", partial(chunked.linear_divergence, _TRITON), 20, _triton_why_not))
DIVERGENCE.register(Backend("reference", partial(chunked.linear_divergence, _TORCH), 0, serve_all))


def linear_divergence(
    student: Projection,
    teacher: Projection | TopTokens,
    labels: Tensor,
    *,
    kind: str = "forward_kl",
    temperature: float = 1.0,
    own: bool = True,
    chunk: int | None = None,
    first_row: int = 0,
    num_rows: int | None = None,
    combine: Combine | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Return each token's divergence of the student from the teacher, and its cross entropy.

    Both read the same logits of the student, which are computed once. Logits of both models have the dtypes of their
    hidden states and take up to 1/32 of the device's memory; those that fit are kept for the backward, as in
    :func:`megalight.ops.cross_entropy.linear_cross_entropy`. The teacher gets no gradient.

    A teacher of stored tokens is compared over its ``K`` tokens and one bucket for all others, into which the student's
    probabilities are summed: ``sum_k p_k (log p_k - log q_k) + p_rest (log p_rest - log q_rest)``. Its probabilities
    are those at the temperature, and are divided by their sum.

    Args:
        teacher: its logits, or its most likely tokens ``[T, K]``.
        labels: ``[T]`` int64. Tokens with negative labels have neither loss.
        kind: a name in :data:`KINDS`; in :data:`TOP_KINDS` for stored tokens.
        temperature: divides the logits of both models for the divergence. It is not multiplied by its square.
        own: compute the cross entropy.
        chunk: tokens per chunk. None: as many as the memory allows.
        first_row, num_rows, combine: as in ``linear_cross_entropy``. ``combine`` is called with tensors ``[k, T]``.
        backend: name of a backend. Stored tokens are compared by torch in any case.

    Returns:
        divergences ``[T]``, and cross entropies ``[T]`` or None, in float32 (float64 for float64).
    """
    refuse("divergences from a teacher")
    size = student.weight.shape[0]
    real = max(0, min(size, (first_row + size if num_rows is None else num_rows) - first_row))
    student = _as_autocast(student)
    if isinstance(teacher, TopTokens):
        entropy = {"forward_kl": True, "cross_entropy": False}[kind]
        return top_k.top_divergence(
            student, teacher, labels, temperature, own, chunk, first_row, real, combine, entropy
        )
    teacher = _as_autocast(teacher)
    fn = choose(
        DIVERGENCE, DivergenceSpec(student.hidden.device.type, student.hidden.dtype, teacher.hidden.dtype), backend
    )
    measure = Measure(kind, temperature, own, real, (student.softcap, teacher.softcap))
    return fn(student, teacher, labels, measure, chunk, first_row, combine)


def _as_autocast(side: Projection) -> Projection:
    device = side.hidden.device.type
    if not torch.is_autocast_enabled(device):
        return side
    return side._replace(hidden=side.hidden.to(torch.get_autocast_dtype(device)))
