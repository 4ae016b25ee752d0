"""Variants of attention built from other backends: sinks, chunks, bidirectional runs of tokens.

:func:`sink_attention` is built from block attention, which returns the log-sum-exp of the scores. A sink adds
``e^s`` to the denominator of the softmax, so the output is multiplied by ``e^lse / (e^lse + e^s)``. The gradients of
queries, keys and values are those of a block whose output and log-sum-exp include the sink, as in a merge of blocks.
The sink itself is a key with the value 0: the gradient of ``s`` is minus the sum of ``p_sink (dO * O)``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention_block import block_attention, block_attention_backward
from megalight.ops.attention_merge import merge
from megalight.ops.autograd import apply, once_differentiable
from megalight.types import PackedSequences, to_device
from megalight.types.packed_sequences import LaterTokens


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    dropout: float,
    sink: Tensor,
) -> Tensor:
    """Attention by the fastest kernel that returns log-sum-exps."""
    out: Tensor = apply(_Sunk, q, k, v, sink, sequences, {"causal": causal, "scale": scale, "window": window})
    return out


class _Sunk(torch.autograd.Function):
    """``q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv], sink [H] -> [T, H, Dv]``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor, sequences: PackedSequences, options: dict[str, Any]
    ) -> Tensor:
        # dense blocks have no bottom-right mask
        dense = sequences.uniform if sequences.keys is None else None
        batch, packing = (1, sequences) if dense is None else (dense[0], None)
        ctx.batch, ctx.packing, ctx.options = batch, packing, options
        query, key, value = (t.view(batch, -1, *t.shape[1:]) for t in (q, k, v))
        out, lse = block_attention(query, key, value, packing, **options)
        total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
        # the factor in the dtype of the log-sum-exp: it is at most 1, and close to it for most queries
        out = (out * (lse - total).exp().transpose(1, 2)[..., None]).to(q.dtype).flatten(0, 1)
        ctx.save_for_backward(q, k, v, sink, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, total = ctx.saved_tensors
        pulled, query, key, value, merged = (
            t.view(ctx.batch, -1, *t.shape[1:]) for t in (grad.contiguous(), q, k, v, out)
        )
        found = block_attention_backward(pulled, query, key, value, merged, total, ctx.packing, **ctx.options)
        grad_sink = None
        if ctx.needs_input_grad[3]:
            product = (grad.to(total.dtype) * out.to(total.dtype)).sum(-1)  # [T, H]
            share = (sink.to(total.dtype)[:, None] - total).exp().transpose(1, 2).flatten(0, 1)
            grad_sink = -(share * product).sum(0).to(sink.dtype)
        return (*(part.flatten(0, 1) for part in found), grad_sink, None, None)


def chunked(sequences: PackedSequences, chunk: int) -> tuple[PackedSequences, Tensor | None]:
    """Cut sequences at multiples of ``chunk`` tokens.

    Queries with keys of their own are the last tokens of their sequence. Only keys in their chunks are left.

    Returns:
        the chunks as sequences, and the indices of the keys that are left. None: all of them.
    """
    if sequences.keys is None:
        if sequences.max_length <= chunk:
            return sequences, None
        return _cut(sequences.lengths, chunk, sequences.device), None
    return _with_keys(sequences.lengths, sequences.keys.lengths, chunk, sequences.device)


# Cached, as all layers of a pass ask for the same: lengths are on the host, and chunks would be copied to the device
# in each layer. Made in inference mode, the tensors could not be saved for backward.
@lru_cache(maxsize=64)
def _cut(lengths: tuple[int, ...], chunk: int, device: torch.device) -> PackedSequences:
    cut = [min(chunk, length - start) for length in lengths for start in range(0, length, chunk)]
    with torch.inference_mode(False):
        return PackedSequences.of_lengths(cut, device)


@lru_cache(maxsize=64)
def _with_keys(
    lengths: tuple[int, ...], keys: tuple[int, ...], chunk: int, device: torch.device
) -> tuple[PackedSequences, Tensor | None]:
    queries: list[int] = []
    left: list[int] = []
    starts: list[int] = []
    offset = 0
    for length, seen in zip(lengths, keys, strict=True):
        first = seen - length
        for start in range(first // chunk * chunk, seen, chunk):
            stop = min(start + chunk, seen)
            queries.append(stop - max(start, first))
            left.append(stop - start)
            starts.append(offset + start)
        offset += seen
    with torch.inference_mode(False):
        described = PackedSequences.of_lengths(left, device)
        rows = None
        if sum(left) < offset:
            rows = described.expand(to_device(starts, torch.int64, device)) + described.positions
        return replace(PackedSequences.of_lengths(queries, device), keys=described), rows


def mutual_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    new_k: Tensor,
    new_v: Tensor,
    sequences: PackedSequences,
    later: LaterTokens,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention within each sequence, and attention to later tokens of the same run.

    The first block is causal attention. The second has the pairs that it lacks: tokens with the later ones of their
    run. In reverse order these are causal, too, so the kernels of causal blocks serve both. The blocks are merged
    by their log-sum-exps, as in ring attention.

    Args:
        q: ``[Tq, H, D]``.
        k: ``[Tk, Hkv, D]``.
        v: ``[Tk, Hkv, Dv]``.
        new_k: ``[Tq, Hkv, D]``: the keys of the queries' own tokens; ``k`` itself if there are no earlier tokens.
        new_v: ``[Tq, Hkv, Dv]``, likewise.
        sequences: how queries and keys divide into sequences, as in :func:`megalight.ops.attention.attention`.
        later: the pairs within runs that are not causal.
        scale: factor on scores; ``1 / sqrt(D)`` by default.
        window: number of earlier tokens that a query sees besides itself. It must cover each run. None: all.

    Returns:
        ``[Tq, H, Dv]``.
    """
    out: Tensor = apply(_Mutual, q, k, v, new_k, new_v, sequences, later, scale, window)
    return out


class _Mutual(torch.autograd.Function):
    """``q [Tq, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], new_k, new_v [Tq, ...] -> [Tq, H, Dv]``."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        new_k: Tensor,
        new_v: Tensor,
        sequences: PackedSequences,
        later: LaterTokens,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        # dense blocks have no bottom-right mask
        dense = sequences.uniform if sequences.keys is None else None
        ctx.batch, ctx.packing = (1, sequences) if dense is None else (dense[0], None)
        ctx.later, ctx.scale, ctx.window = later, scale, window
        query, key, value = (t.view(ctx.batch, -1, *t.shape[1:]) for t in (q, k, v))
        out, lse = block_attention(query, key, value, ctx.packing, causal=True, scale=scale, window=window)
        out, lse = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)  # [Tq, H, Dv], [Tq, H]
        rows, keys = later.rows, later.keys
        taken = q[rows][None], new_k[keys][None], new_v[keys][None]
        other = block_attention(*taken, later.sequences, causal=True, scale=scale)
        both, sums = merge(out[rows][None], lse[rows].T[None].contiguous(), *other)
        out[rows], lse[rows] = both[0].to(out.dtype), sums[0].T
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, new_k, new_v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, new_k, new_v, out, lse = ctx.saved_tensors
        grad, later, rows, keys = grad.contiguous(), ctx.later, ctx.later.rows, ctx.later.keys
        pulled, query, key, value, merged, sums = (
            t.view(ctx.batch, -1, *t.shape[1:]) for t in (grad, q, k, v, out, lse)
        )
        found = block_attention_backward(
            pulled,
            query,
            key,
            value,
            merged,
            sums.transpose(1, 2).contiguous(),
            ctx.packing,
            causal=True,
            scale=ctx.scale,
            window=ctx.window,
        )
        grad_q, grad_k, grad_v = (part.flatten(0, 1) for part in found)
        more = block_attention_backward(
            grad[rows][None],
            q[rows][None],
            new_k[keys][None],
            new_v[keys][None],
            out[rows][None],
            lse[rows].T[None].contiguous(),
            later.sequences,
            causal=True,
            scale=ctx.scale,
        )
        # No row is there twice, so the order of sums is always the same.
        grad_q = grad_q.index_add(0, rows, more[0][0].to(grad_q.dtype))
        new = [torch.zeros_like(t).index_add(0, keys, part[0]) for t, part in ((new_k, more[1]), (new_v, more[2]))]
        return grad_q, grad_k, grad_v, *new, None, None, None, None
