"""Attention in plain torch with explicit masks, for any dtype. Half types are computed in float32."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import mask, wide
from megalight.types import PackedSequences


def softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax of ``scores [..., H, Tq, Tk]``; ``e^sink`` of each head ``[H]`` is one more term of the denominator."""
    if sink is None:
        return scores.softmax(-1)
    # a last column, which has no value; so the maximum that is subtracted includes it
    column = sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


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
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence after the other, with the whole score matrix."""
    keys = sequences.keys or sequences
    outputs = []
    parts = zip(
        *(torch.split(t, list(sizes)) for t, sizes in ((q, sequences.lengths), (k, keys.lengths), (v, keys.lengths))),
        strict=True,
    )
    for q_i, k_i, v_i in parts:
        repeats = q_i.shape[1] // k_i.shape[1]
        query = q_i.transpose(0, 1).to(wide(q.dtype))
        # `[H, S, D]`; each key head is repeated for the query heads that share it.
        key, value = (t.transpose(0, 1).to(query.dtype).repeat_interleave(repeats, 0) for t in (k_i, v_i))
        scores = query @ key.transpose(1, 2) * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        allowed = mask(q_i.shape[0], k_i.shape[0], causal, window, q.device)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        weights = F.dropout(softmax(scores, sink), dropout)
        outputs.append((weights @ value).transpose(0, 1).to(q.dtype))
    return torch.cat(outputs)
