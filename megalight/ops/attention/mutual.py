"""Causal attention in which the tokens of a run see each other (Gemma-3's images), built from two blocks.

The first block is causal attention. The second has the pairs that it lacks: tokens with the later ones of their run. In
reverse order these are causal, too, so the kernels of causal blocks serve both. The blocks are merged by their
log-sum-exps, as in ring attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention_block import block_attention, block_attention_backward
from megalight.ops.attention_merge import merge
from megalight.ops.common import apply, once_differentiable
from megalight.types import PackedSequences
from megalight.types.packed import Later


def mutual_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    new_k: Tensor,
    new_v: Tensor,
    sequences: PackedSequences,
    later: Later,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention within each sequence, and attention to later tokens of the same run.

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
        later: Later,
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
