"""The merge in one pass over memory. A program handles some queries of one head."""

from __future__ import annotations

from torch import Tensor

from megalight.ops.jit import Value, cdiv, constexpr, jit, next_power, tl

BLOCK = 4096
"""Elements of the output that a program handles."""


@jit
def _merge(
    out_a: Value,
    lse_a: Value,
    out_b: Value,
    lse_b: Value,
    out: Value,
    lse: Value,
    queries: Value,
    a_row: Value,
    a_query: Value,
    a_head: Value,
    b_row: Value,
    b_query: Value,
    b_head: Value,
    out_row: Value,
    out_query: Value,
    out_head: Value,
    lse_a_row: Value,
    lse_a_head: Value,
    lse_b_row: Value,
    lse_b_head: Value,
    lse_row: Value,
    lse_head: Value,
    DIM: constexpr,
    DIM_BLOCK: constexpr,
    QUERY_BLOCK: constexpr,
) -> None:
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


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Write ``out`` and ``lse``, which may be the tensors of block a or b."""
    rows, queries, heads, dim = out.shape
    dim_block = next_power(dim)
    query_block = max(1, BLOCK // dim_block)
    if not out.numel():
        return
    # Heads are the first grid axis: programs that run at the same time then read contiguous memory.
    _merge[(heads, cdiv(queries, query_block), rows)](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        queries,
        *out_a.stride()[:3],
        *out_b.stride()[:3],
        *out.stride()[:3],
        *lse_a.stride()[:2],
        *lse_b.stride()[:2],
        *lse.stride()[:2],
        DIM=dim,
        DIM_BLOCK=dim_block,
        QUERY_BLOCK=query_block,
        num_warps=8,
    )
