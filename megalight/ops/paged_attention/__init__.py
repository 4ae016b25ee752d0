"""Attention to keys and values that lie in blocks of a pool, read through the block table of each sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops.attention.batch_invariant import PagedAttentionOptions, invariant_attention
from megalight.ops.batch_invariant import MODE, refuse
from megalight.ops.common import HALF, cuda_why_not, fp8_why_not, lazy, serve_all, softmax, triton_why_not, wide
from megalight.ops.paged_append import dequantize_heads
from megalight.registry import Backend, BackendRegistry, choose
from megalight.types import Pages


def reference_paged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, pages: Pages, options: PagedAttentionOptions
) -> Tensor:
    """See :func:`paged_attention`."""
    outputs, first = [], 0
    pages = of_tokens(pages, len(q)) if pages.recorded else pages
    # Sequences with one query go together, as in a decode step; each of the others goes alone.
    parts = [pages.decodes] if pages.decodes else []
    parts += [1] * (len(pages.query_lengths) - pages.decodes)
    tokens = 0
    for count in parts:
        queries = count * pages.query_lengths[first]
        outputs.append(_attend(q[tokens : tokens + queries], k_pool, v_pool, pages, first, count, options))
        first, tokens = first + count, tokens + queries
    return torch.cat(outputs)


def of_tokens(pages: Pages, count: int) -> Pages:
    """Let each of the tokens be a sequence, as only the device knows how many have which. Attention is causal."""
    token, sequence = torch.arange(count, dtype=torch.int32, device=pages.lengths.device), pages.owners(count)
    # Of padding, which has no stored tokens, what it sees is read by no one.
    lengths = (pages.lengths[sequence] - (pages.cu_queries[sequence + 1] - 1 - token)).clamp(min=1)
    bounds = (max(pages.bounds),) * count
    return replace(
        pages,
        block_table=pages.block_table[sequence],
        lengths=lengths,
        query_lengths=(1,) * count,
        bounds=bounds,
        recorded=False,
    )


def _attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Pages,
    first: int,
    count: int,
    options: PagedAttentionOptions,
) -> Tensor:
    """Attend in ``count`` sequences with equally many queries."""
    causal, scale, window, chunk, softcap, sink, scales, rotary_pool = options
    (_, heads, size), kv_heads, dtype = q.shape, k_pool.shape[1], wide(q.dtype)
    bound = max(pages.bounds[first : first + count])
    table = pages.block_table[first : first + count, : -(-bound // pages.page_size)].long()

    def rows_of(pool: Tensor) -> Tensor:
        """``[N, Hkv, ...] -> [n, bound, Hkv, ...]``."""
        # As bytes: not all devices index floats of 8 bits.
        whole = pool.view(torch.uint8) if pool.itemsize == 1 else pool
        rows = whole.view(-1, pages.page_size, *pool.shape[1:])[table].flatten(1, 2)[:, :bound]
        return rows.view(pool.dtype)

    def stored(pool: Tensor, scale: Tensor | None) -> Tensor:
        """``[N, Hkv, D] -> [n, Hkv, bound, D]``."""
        rows = rows_of(pool)
        found = rows.to(dtype) if scale is None else dequantize_heads(rows, rows_of(scale), dtype)
        return found.transpose(1, 2)

    k_scale, v_scale = scales or (None, None)
    key, value = stored(k_pool, k_scale), stored(v_pool, v_scale)
    if rotary_pool is not None:
        key = torch.cat([key, stored(rotary_pool, None)], -1)
    # `[n, Hkv, H / Hkv, Tq, D]`: query heads that share a key head are rows of one product.
    query = q.to(dtype).view(count, -1, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
    length = query.shape[3]
    scores = (query.flatten(2, 3) @ key.mT).view(*query.shape[:4], bound)
    scores = scores * (1 / math.sqrt(size) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    index = torch.arange(bound, device=q.device)
    present = pages.lengths[first : first + count, None, None]
    places = present + torch.arange(-length, 0, device=q.device)[:, None]  # of the queries, [n, length, 1]
    allowed = index <= places if causal else index < present
    if window is not None:
        allowed = allowed & (index >= places - window)
    if chunk is not None:
        allowed = allowed & (index // chunk == places // chunk)
    scores = scores.masked_fill(~allowed[:, None, None], -torch.inf)
    # a row of the softmax per head and query
    weights = softmax(scores.flatten(1, 2), sink).view(*key.shape[:2], -1, bound)
    # Rows that hold no token that is seen may hold NaN, and 0 times NaN is NaN.
    value = value.masked_fill(~allowed.any(1)[:, None, :, None], 0)
    out = (weights @ value).view(*query.shape[:4], -1).permute(0, 3, 1, 2, 4)
    return out.reshape(len(q), heads, -1).to(q.dtype)


class PagedAttentionSpec(NamedTuple):
    """A request to attention through block tables.

    Attributes:
        device: device type.
        dtype: dtype of queries and pools.
        head_dim: size of a query and key head.
        value_dim: size of a value head.
        page_size: tokens of a block.
        shared: whether values are the first features of the keys, as in latent attention.
        causal: whether a query sees no later key.
        window: whether a query sees only a limited number of earlier keys.
        chunk: whether a query sees only keys of its own chunk.
        softcap: whether scores are capped.
        sink: whether the softmax has sinks.
        quantized: whether pools are of e4m3.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    page_size: int = 16
    shared: bool = False
    causal: bool = True
    window: bool = False
    chunk: bool = False
    softcap: bool = False
    sink: bool = False
    quantized: bool = False


PAGE_SIZES: dict[str, int] = {}
"""Tokens of a block that a backend needs, where it does not take any number."""
PAGED_ATTENTION: BackendRegistry[PagedAttentionSpec, Callable[..., Tensor]] = BackendRegistry("paged_attention")
REGISTRIES: tuple[BackendRegistry[PagedAttentionSpec, Any], ...] = (PAGED_ATTENTION,)
EXAMPLE = PagedAttentionSpec("cpu", torch.bfloat16, 128, 128)


def _triton_why_not(spec: PagedAttentionSpec) -> str | None:
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    widest = 576 if spec.shared else 256
    if spec.head_dim > widest:
        return f"needs heads of at most {widest} features, not {spec.head_dim}"
    unserved = cuda_why_not(spec.device) or triton_why_not(spec.device, spec.dtype)
    return unserved or (fp8_why_not(spec.device) if spec.quantized else None)


_triton = lazy("megalight.ops.paged_attention.triton", "paged_attention")
PAGED_ATTENTION.register(Backend("triton", _triton, 20, _triton_why_not))
PAGED_ATTENTION.register(Backend("reference", reference_paged_attention, 0, serve_all))


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Pages,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    rotary_pool: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``softmax(q k^T * scale) v`` within each sequence, whose keys and values lie in pools. It has no gradient.

    Queries are the last tokens of their sequence, and their keys and values are stored already.

    Args:
        q: ``[T, H, D]``.
        k_pool: ``[N, Hkv, D]``, contiguous; ``H`` is a multiple of ``Hkv``.
        v_pool: ``[N, Hkv, Dv]``; it may be a view of the first features of ``k_pool``.
        pages: where the sequences lie in the pools.
        causal: whether a query sees no later key.
        scale: factor on scores; ``1 / sqrt(D)`` by default.
        window: number of earlier tokens that a query sees besides itself. None: all.
        chunk: a query sees only keys of its own chunk of so many tokens. None: all.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sink: ``[H]``: the denominator of a head's softmax has one more term, ``e^sink``. None: no sink.
        scales: ``[N, Hkv]`` float32 of pools in e4m3, for keys and for values (:func:`~megalight.ops.paged_append`).
            None: the pools have the dtype of ``q``.
        rotary_pool: ``[N, Hkv, R]`` in the dtype of ``q``: the last features of keys, which ``k_pool [N, Hkv, D - R]``
            in e4m3 then has not, nor do scales apply to them (:func:`~megalight.ops.paged_append.append_latents`);
            ``v_pool`` is ``k_pool``. None: ``k_pool`` has all.
        backend: name of a backend.

    Returns:
        ``[T, H, Dv]``.

    Raises:
        BackendError: the named backend cannot serve.
    """
    options = PagedAttentionOptions(causal, scale, window, chunk, softcap, sink, scales, rotary_pool)
    if MODE.on:
        if scales is not None:
            refuse("keys and values in 8 bits, which a training forward does not read")
        return invariant_attention(_triton, q, k_pool, v_pool, pages, options)
    spec = PagedAttentionSpec(
        q.device.type,
        q.dtype,
        q.shape[-1],
        v_pool.shape[-1],
        pages.page_size,
        v_pool.data_ptr() == k_pool.data_ptr(),
        causal,
        window is not None,
        chunk is not None,
        softcap is not None,
        sink is not None,
        scales is not None,
    )
    return choose(PAGED_ATTENTION, spec, backend)(q, k_pool, v_pool, pages, options)
