"""Attention by ``scaled_dot_product_attention``: equally long sequences as one dense batch, others one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.attention_mask import mask
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
    """Attention. A uniform batch is viewed as ``[B, H, S, D]`` without a copy."""
    keys = sequences.keys or sequences
    if sequences.uniform is not None and keys.uniform is not None:
        return _dense(q, k, v, sequences.uniform[0], causal, scale, window, dropout)
    parts = zip(
        *(torch.split(t, list(sizes)) for t, sizes in ((q, sequences.lengths), (k, keys.lengths), (v, keys.lengths))),
        strict=True,
    )
    return torch.cat([_dense(q_i, k_i, v_i, 1, causal, scale, window, dropout) for q_i, k_i, v_i in parts])


def _dense(
    q: Tensor, k: Tensor, v: Tensor, batch: int, causal: bool, scale: float | None, window: int | None, dropout: float
) -> Tensor:
    """Attention of ``[B * S, H, D]``: ``batch`` equally long sequences."""
    tokens, heads, _ = q.shape
    query, key, value = [t.view(batch, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v)]
    length, num_keys = query.shape[2], key.shape[2]
    if causal and length == 1:  # the only query is the last position: no key is later
        causal = False
    if window is not None and num_keys <= window + 1 and causal:  # the window covers all keys
        window = None
    aligned = causal and window is None and length == num_keys  # torch's own causal mask fits: faster than a tensor
    allowed = None if aligned else mask(length, num_keys, causal, window, q.device)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=allowed,
        dropout_p=dropout,
        is_causal=aligned,
        scale=scale,
        enable_gqa=heads != k.shape[1],
    )
    return out.transpose(1, 2).reshape(tokens, heads, v.shape[-1])
