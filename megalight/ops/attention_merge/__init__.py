"""Two blocks of attention into one: outputs over different keys become the output over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.errors import LayoutError
from megalight.ops.attention_merge import reference
from megalight.ops.common import lazy, serve_all, triton_why_not, wide
from megalight.registry import Backend, BackendRegistry, remembered


class Spec(NamedTuple):
    """What a merge must serve: device type, and types of the two outputs and of the merged one."""

    device: str
    dtype: torch.dtype
    other_dtype: torch.dtype
    merged_dtype: torch.dtype


ATTENTION_MERGE: BackendRegistry[Spec, Callable[..., None]] = BackendRegistry("attention_merge")
REGISTRIES: tuple[BackendRegistry[Spec, Callable[..., None]], ...] = (ATTENTION_MERGE,)
EXAMPLE = Spec("cpu", torch.float32, torch.bfloat16, torch.float32)


def _triton_why_not(spec: Spec) -> str | None:
    return triton_why_not(spec.device, spec.dtype, spec.other_dtype, spec.merged_dtype)


ATTENTION_MERGE.register(Backend("triton", lazy("megalight.ops.attention_merge.triton", "merge"), 20, _triton_why_not))
ATTENTION_MERGE.register(Backend("reference", reference.merge, 0, serve_all))


@remembered
def _choose(spec: Spec, backend: str) -> Callable[..., None]:
    return ATTENTION_MERGE.select(spec, backend).fn


def merge(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    into: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``lse = log(e^lse_a + e^lse_b)`` and ``out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b``.

    Sums are formed in float32 (float64 for float64). A log-sum-exp of minus infinity is that of a query that has seen
    no key: its output has no weight, and is 0 where both are such.

    Args:
        out_a: ``[B, S, H, D]``; may be a view with the features side by side.
        lse_a: ``[B, H, S]``; may be a view with the queries side by side.
        out_b: ``[B, S, H, D]``.
        lse_b: ``[B, H, S]``.
        into: where output and log-sum-exp go; may be ``(out_a, lse_a)``. By default new tensors, the output in the
            type that sums are formed in.
        backend: a backend's name.

    Returns:
        ``into``, or the new tensors.

    Raises:
        LayoutError: shapes differ.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or lse_a.mT.shape != out_a.shape[:3]:
        raise LayoutError(
            f"outputs {tuple(out_a.shape)}, {tuple(out_b.shape)} and log-sum-exps {tuple(lse_a.shape)}, "
            f"{tuple(lse_b.shape)} cannot be merged; they must be [B, S, H, D] and [B, H, S] of the same queries."
        )
    if into is None:
        into = (
            torch.empty_like(out_a, dtype=wide(out_a.dtype), memory_format=torch.contiguous_format),
            torch.empty_like(lse_a, memory_format=torch.contiguous_format),
        )
    spec = Spec(out_a.device.type, out_a.dtype, out_b.dtype, into[0].dtype)
    _choose(spec, backend)(out_a, lse_a, out_b, lse_b, *into)
    return into
