"""Dense attention by cuDNN. On Hopper it is nearly twice as fast as torch's flash kernel.

We call the operator behind ``scaled_dot_product_attention`` directly: to choose it with ``sdpa_kernel`` would set
process-wide flags at every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.attention import sdpa
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
) -> Tensor:
    """Attention of a uniform batch, viewed as ``[B, H, S, D]``."""
    assert sequences.uniform is not None  # `why_not` refuses others
    batch, length = sequences.uniform
    if length == 1:  # cuDNN cannot serve single queries
        return sdpa.attention(q, k, v, sequences, causal, scale, window, softcap, dropout)
    query, key, value = (t.view(batch, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    needs_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        # The log-sum-exp is needed for a backward alone.
        query,
        key,
        value,
        None,
        needs_gradient,
        dropout,
        causal,
        False,
        scale=scale,
    )[0]
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[1], v.shape[-1])
