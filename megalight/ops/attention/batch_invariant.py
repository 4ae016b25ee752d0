"""Attention in batch-invariant mode: keys of a sequence are taken in the same blocks and order in every pass.

A training forward, a part of a prompt and a decode step run the same kernel. Keys are not split over programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import softmax, wide
from megalight.types import PackedSequences, Pages


class PagedAttentionOptions(NamedTuple):
    """What :func:`megalight.ops.paged_attention.paged_attention` takes beside queries, pools and pages."""

    causal: bool = True
    scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    scales: tuple[Tensor, Tensor] | None = None
    rotary_pool: Tensor | None = None


def pages_of(sequences: PackedSequences) -> Pages:
    """Return packed keys as blocks of one token, in the order in which they lie."""
    keys = sequences.keys or sequences
    starts, lengths = keys.cu_seqlens[:-1], keys.cu_seqlens[1:] - keys.cu_seqlens[:-1]
    table = starts[:, None] + torch.arange(max(keys.lengths), dtype=torch.int32, device=keys.device)
    nothing = torch.empty(0, dtype=torch.int64, device=keys.device)
    return Pages(
        table, lengths, sequences.cu_seqlens, nothing, nothing, 1, sequences.lengths, keys.lengths, continued=True
    )


def attend_alone(q: Tensor, k_pool: Tensor, v_pool: Tensor, pages: Pages, options: PagedAttentionOptions) -> Tensor:
    """Attend with one query at a time: ``q [T, H, D] -> [T, H, Dv]``. For the CPU."""
    out = q.new_zeros(*q.shape[:2], v_pool.shape[-1])
    offset = torch.arange(max(pages.bounds), device=q.device)
    ends: list[int] = pages.cu_queries.tolist()
    for sequence, length in enumerate(pages.lengths.tolist()):
        if not length:  # padding of a recorded pass
            continue
        places = offset[:length]
        rows = pages.block_table[sequence, places // pages.page_size].long() * pages.page_size
        rows += places % pages.page_size
        begin, end = ends[sequence : sequence + 2]
        for token in range(begin, end):
            seen = _seen(length - (end - token), length, options)
            out[token] = _attend(q[token], k_pool[rows[seen]], v_pool[rows[seen]], options)
    return out


def _seen(place: int, length: int, options: PagedAttentionOptions) -> slice:
    """Return the keys that the query at ``place`` sees."""
    first = 0 if options.window is None else max(0, place - options.window)
    last = place + 1 if options.causal else length
    if options.chunk is not None:
        begin = place // options.chunk * options.chunk
        first, last = max(first, begin), min(last, begin + options.chunk)
    return slice(first, last)


def _attend(q: Tensor, k: Tensor, v: Tensor, options: PagedAttentionOptions) -> Tensor:
    """``q [H, D], k [n, Hkv, D], v [n, Hkv, Dv] -> [H, Dv]``."""
    dtype, (heads, size) = wide(q.dtype), q.shape
    query = q.to(dtype, copy=True).view(k.shape[1], -1, size)
    scores = query @ k.to(dtype).permute(1, 2, 0)
    scores = scores * (1 / math.sqrt(size) if options.scale is None else options.scale)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    weights = softmax(scores.view(heads, 1, -1), options.sink).view(scores.shape)
    return (weights @ v.to(dtype).transpose(0, 1)).reshape(heads, -1).to(q.dtype)


def invariant_attention(
    kernel: Callable[..., Tensor],
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Pages,
    options: PagedAttentionOptions,
) -> Tensor:
    """Attend to stored keys: on the CPU by query, elsewhere with the ``kernel`` of paged attention in fixed blocks."""
    if q.device.type == "cpu":
        return attend_alone(q, k_pool, v_pool, pages, options)
    return kernel(q, _by_head(k_pool), _by_head(v_pool), pages, options, fixed=True)


def _by_head(rows: Tensor) -> Tensor:
    """Return rows ``[N, Hkv, D]`` whose heads lie side by side, as the kernel reads them."""
    plain = rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == rows.shape[2])
    return rows if plain else rows.contiguous()
