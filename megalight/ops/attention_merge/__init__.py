"""Merging two blocks of attention: outputs over different keys become the output over all keys."""

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
    """A request to a merge: device type, dtypes of the two outputs and of the merged output."""

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
    """Compute ``lse = log(e^lse_a + e^lse_b)`` and ``out = e^(lse_a - lse) out_a + e^(lse_b - lse) out_b``.

    Sums are computed in float32 (float64 for float64). A log-sum-exp of minus infinity means that the query has seen no
    key. Its output then has weight 0, and the result is 0 if this holds for both.

    Args:
        out_a: ``[B, S, H, D]``; may be a view if the last dim is contiguous.
        lse_a: ``[B, H, S]``; may be a view if the last dim is contiguous.
        out_b: ``[B, S, H, D]``.
        lse_b: ``[B, H, S]``.
        into: tensors for the output and the log-sum-exp; may be ``(out_a, lse_a)``. Default: new tensors, with the
            output in the dtype of the sums.
        backend: name of a backend.

    Returns:
        ``into``, or the new tensors.

    Raises:
        LayoutError: the shapes do not fit, or a last dim is not contiguous.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or lse_a.mT.shape != out_a.shape[:3]:
        raise LayoutError(
            f"outputs {tuple(out_a.shape)}, {tuple(out_b.shape)} and log-sum-exps {tuple(lse_a.shape)}, "
            f"{tuple(lse_b.shape)} cannot be merged; they must be [B, S, H, D] and [B, H, S] with equal B, S, H, D."
        )
    if any(part.stride(-1) != 1 and part.shape[-1] > 1 for part in (out_a, lse_a, out_b, lse_b)):
        raise LayoutError(
            f"outputs and log-sum-exps have strides {[part.stride() for part in (out_a, lse_a, out_b, lse_b)]}; the "
            "last of each must be 1. Call `contiguous()` first."
        )
    if into is None:
        into = (
            torch.empty_like(out_a, dtype=wide(out_a.dtype), memory_format=torch.contiguous_format),
            torch.empty_like(lse_a, memory_format=torch.contiguous_format),
        )
    spec = Spec(out_a.device.type, out_a.dtype, out_b.dtype, into[0].dtype)
    _choose(spec, backend)(out_a, lse_a, out_b, lse_b, *into)
    return into
