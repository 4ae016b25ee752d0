"""Attention with sinks, built from block attention: it needs the log-sum-exp of the scores, which blocks return.

A sink adds ``e^s`` to the denominator of the softmax, so the output is multiplied by ``e^lse / (e^lse + e^s)``. The
gradients of queries, keys and values are those of a block whose output and log-sum-exp include the sink, as in a merge
of blocks. The sink itself is a key with the value 0: the gradient of ``s`` is minus the sum of ``p_sink (dO * O)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention_block import block_attention, block_attention_backward
from megalight.ops.common import apply, once_differentiable
from megalight.types import PackedSequences


def attention(
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
