"""Merging two blocks of attention: outputs over different keys become the output over all keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.errors import LayoutError
from megalight.ops.common import serve_all, triton_why_not, wide
from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl
from megalight.registry import Backend, BackendRegistry, choose


def reference_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Write ``out`` and ``lse``, which may be the tensors of block a or b."""
    merged = torch.logaddexp(lse_a, lse_b)
    # A query that saw no key in either block gives -inf - (-inf) = NaN; its weights are 0.
    weights = ((part - merged).exp().nan_to_num(0).mT[..., None] for part in (lse_a, lse_b))
    # Both terms exist before `out` is written, because `out` may be one of the parts.
    terms = [weight * part.to(weight.dtype) for weight, part in zip(weights, (out_a, out_b), strict=True)]
    out.copy_(terms[0] + terms[1])
    lse.copy_(merged)


BLOCK = 4096
"""Elements of the output that a program handles."""


@jit
def _merge(
    out_a: Value, lse_a: Value, out_b: Value, lse_b: Value, out: Value, lse: Value, queries: Value, a_row: Value,
    a_query: Value, a_head: Value, b_row: Value, b_query: Value, b_head: Value, out_row: Value, out_query: Value,
    out_head: Value, lse_a_row: Value, lse_a_head: Value, lse_b_row: Value, lse_b_head: Value, lse_row: Value,
    lse_head: Value,
    DIM: constexpr, DIM_BLOCK: constexpr, QUERY_BLOCK: constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    query = tl.program_id(1).to(tl.int64) * QUERY_BLOCK + tl.arange(0, QUERY_BLOCK)
    here = query < queries
    nothing = float("-inf")
    # The log-sum-exps are loaded before `lse` is stored, and each program reads and writes only its own queries: so
    # outputs may be one of the inputs.
    a = tl.load(lse_a + row * lse_a_row + head * lse_a_head + query, mask=here, other=nothing)
    b = tl.load(lse_b + row * lse_b_row + head * lse_b_head + query, mask=here, other=nothing)
    high = tl.maximum(a, b)  # subtracted for stability
    high = tl.where(high == nothing, 0.0, high)  # no key seen in either block: avoid -inf - (-inf)
    weight_a = tl.exp(a - high)
    weight_b = tl.exp(b - high)
    total = weight_a + weight_b
    # A total of 0 means that neither block has a key for this query: 0 / 0 would be NaN, so write output 0 and -inf.
    some = total > 0.0
    total = tl.where(some, total, 1.0)
    logs = tl.where(some, high + tl.log(total), nothing)
    tl.store(lse + row * lse_row + head * lse_head + query, logs, mask=here)
    # Divide once per query instead of once per element.
    share = 1.0 / total
    feature = tl.arange(0, DIM_BLOCK)[None, :]
    inside = here[:, None] & (feature < DIM)
    at = query[:, None]
    x = tl.load(out_a + row * a_row + at * a_query + head * a_head + feature, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(out_b + row * b_row + at * b_query + head * b_head + feature, mask=inside, other=0.0).to(tl.float32)
    merged = x * (weight_a * share)[:, None] + y * (weight_b * share)[:, None]
    target = out + row * out_row + at * out_query + head * out_head + feature
    tl.store(target, merged.to(out.dtype.element_ty), mask=inside)


def triton_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Write ``out`` and ``lse``, which may be the tensors of block a or b."""
    rows, queries, heads, dim = out.shape
    dim_block = next_power(dim)
    query_block = max(1, BLOCK // dim_block)
    if not out.numel():
        return
    # Heads are the first grid axis: programs that run at the same time then read contiguous memory.
    _merge[(heads, cdiv(queries, query_block), rows)](
        out_a, lse_a, out_b, lse_b, out, lse, queries, *out_a.stride()[:3], *out_b.stride()[:3], *out.stride()[:3],
        *lse_a.stride()[:2], *lse_b.stride()[:2], *lse.stride()[:2],
        DIM=dim, DIM_BLOCK=dim_block, QUERY_BLOCK=query_block, num_warps=8,
    )  # fmt: skip


class AttentionMergeSpec(NamedTuple):
    """A request to a merge: device type, dtypes of the two outputs and of the merged output."""

    device: str
    dtype: torch.dtype
    other_dtype: torch.dtype
    merged_dtype: torch.dtype


ATTENTION_MERGE: BackendRegistry[AttentionMergeSpec, Callable[..., None]] = BackendRegistry("attention_merge")
REGISTRIES: tuple[BackendRegistry[AttentionMergeSpec, Callable[..., None]], ...] = (ATTENTION_MERGE,)
EXAMPLE = AttentionMergeSpec("cpu", torch.float32, torch.bfloat16, torch.float32)


def _triton_why_not(spec: AttentionMergeSpec) -> str | None:
    return triton_why_not(spec.device, spec.dtype, spec.other_dtype, spec.merged_dtype)


ATTENTION_MERGE.register(Backend("triton", triton_merge, 20, _triton_why_not))
ATTENTION_MERGE.register(Backend("reference", reference_merge, 0, serve_all))


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
    spec = AttentionMergeSpec(out_a.device.type, out_a.dtype, out_b.dtype, into[0].dtype)
    choose(ATTENTION_MERGE, spec, backend)(out_a, lse_a, out_b, lse_b, *into)
    return into
