"""Attention of tokens that are guessed one after another, for all places of a sequence at once.

In step ``n`` the guess at position ``t`` sees the real tokens up to ``t``, which are the keys of step 0. It also sees
its guesses: the guesses of steps 1 to ``n`` at the same position, one key per step
(https://arxiv.org/abs/2503.01840, figure 6). The real tokens are a causal block of attention; the few keys of the
guesses are merged with it by log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention import attention
from megalight.ops.attention_block import block_attention, block_attention_backward
from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.common import wide
from megalight.types import PackedSequences


def draft_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    sequences: PackedSequences,
    *,
    scale: float | None = None,
) -> Tensor:
    """Return the output ``[T, H, Dv]`` of step ``len(keys) - 1``.

    Args:
        q: ``[T, H, D]``, the queries of this step.
        keys: for each step up to this one ``[T, Hkv, D]``; those of the first step ``[Tk, Hkv, D]``, if
            ``sequences.keys`` describes them.
        values: likewise, ``[T, Hkv, Dv]``.
        sequences: how the places divide into sequences. Queries are the last tokens of ``sequences.keys``.
        scale: factor on scores; ``1 / sqrt(D)`` by default.

    Raises:
        LayoutError: the tokens are a context-parallel share.
    """
    if len(keys) == 1:
        return attention(q, keys[0], values[0], sequences, scale=scale)
    guesses = torch.stack(list(keys[1:])), torch.stack(list(values[1:]))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out: Tensor = apply(_DraftAttention, q, keys[0], values[0], *guesses, sequences, scale)
    return out


class _DraftAttention(torch.autograd.Function):
    """``q [T, H, D]``, ``k, v [Tk, Hkv, D]``, and of the earlier guesses ``[n, T, Hkv, D]``."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        sequences: PackedSequences,
        scale: float,
    ) -> Tensor:
        dense = sequences.uniform if sequences.keys is None else None
        ctx.batch, ctx.packing = (1, sequences) if dense is None else (dense[0], None)
        ctx.scale = scale
        query, key, value = (t.view(ctx.batch, -1, *t.shape[1:]) for t in (q, k, v))
        out, lse = block_attention(query, key, value, ctx.packing, causal=True, scale=scale)
        # `[T, H]`, of the real tokens
        real = lse.transpose(1, 2).flatten(0, 1)
        scores = _by_head(q, own_k) * scale
        total = torch.logaddexp(real, scores.logsumexp(0))
        weights = (scores - total).exp()
        merged = out.flatten(0, 1) * (real - total).exp()[..., None] + _sum(weights, own_v)
        merged = merged.to(q.dtype)
        ctx.save_for_backward(q, k, v, own_k, own_v, merged, total)
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, out, total = ctx.saved_tensors
        pulled, query, key, value, merged = (
            t.view(ctx.batch, -1, *t.shape[1:]) for t in (grad.contiguous(), q, k, v, out)
        )
        lse = total.view(ctx.batch, -1, total.shape[1]).transpose(1, 2).contiguous()
        # With the merged output and log-sum-exp, the gradients of the block and of the earlier guesses add up to the
        # whole.
        found = block_attention_backward(
            pulled, query, key, value, merged, lse, ctx.packing, causal=True, scale=ctx.scale
        )
        grad_q, grad_k, grad_v = (part.flatten(0, 1) for part in found)
        pull, kind = grad.to(total.dtype), total.dtype
        weights = (_by_head(q, own_k) * ctx.scale - total).exp()  # [n, T, H]
        slopes = _by_head(pull, own_v) - (pull * out.to(kind)).sum(-1)
        slopes = weights * slopes * ctx.scale
        grad_q = (grad_q.to(kind) + _sum(slopes, own_k)).to(q.dtype)
        return grad_q, grad_k, grad_v, _outer(slopes, q, own_k), _outer(weights, grad, own_v), None, None


def _by_head(heads: Tensor, own: Tensor) -> Tensor:
    """``[T, H, D], [n, T, Hkv, D] -> [n, T, H]``: products of each query head with its key head."""
    kind = wide(heads.dtype)
    grouped = heads.to(kind).reshape(len(heads), own.shape[2], -1, heads.shape[-1])
    return torch.einsum("tkgd,ntkd->ntkg", grouped, own.to(kind)).flatten(2)


def _sum(weights: Tensor, own: Tensor) -> Tensor:
    """``[n, T, H], [n, T, Hkv, D] -> [T, H, D]``: the weighted sum over the earlier guesses."""
    grouped = weights.reshape(*own.shape[:3], -1)
    return torch.einsum("ntkg,ntkd->tkgd", grouped, own.to(weights.dtype)).flatten(1, 2)


def _outer(weights: Tensor, heads: Tensor, own: Tensor) -> Tensor:
    """``[n, T, H], [T, H, D] -> [n, T, Hkv, D]``: query heads that share a key head are summed."""
    grouped, each = weights.reshape(*own.shape[:3], -1), heads.reshape(len(heads), own.shape[2], -1, heads.shape[-1])
    return torch.einsum("ntkg,tkgd->ntkd", grouped, each.to(weights.dtype)).to(own.dtype)
