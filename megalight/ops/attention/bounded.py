"""Attention to keys whose number only the device knows: plain torch, every sequence at its bound, the rest masked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalight.errors import LayoutError
from megalight.ops.attention.reference import softmax
from megalight.ops.common import wide
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
    sink: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Queries are the last of the tokens that are there. Shapes follow from the bound: such a step can be recorded.

    Raises:
        LayoutError: sequences of queries are not equally long.
    """
    keys = sequences.keys
    assert keys is not None
    assert keys.present is not None
    if sequences.uniform is None:
        raise LayoutError(
            f"queries of {list(sequences.lengths)[:8]} tokens look at keys with a bound; give each sequence as many."
        )
    batch, length = sequences.uniform
    query, key, value = (t.view(batch, -1, *t.shape[1:]).transpose(1, 2).to(wide(q.dtype)) for t in (q, k, v))
    key, value = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    index = torch.arange(key.shape[2], device=q.device)
    present = keys.present[:, None, None]
    places = present + torch.arange(-length, 0, device=q.device)[:, None]  # of the queries, [n, length, 1]
    allowed = index <= places if causal else index < present
    if window is not None:
        allowed = allowed & (index >= places - window)
    if chunk is not None:
        allowed = allowed & (index // chunk == places // chunk)
    weights = softmax(scores.masked_fill(~allowed[:, None], -torch.inf), sink)
    value = value.masked_fill((index >= present).transpose(1, 2)[:, None], 0)  # 0 times what was never written
    return (weights @ value).transpose(1, 2).reshape(len(q), q.shape[1], -1).to(q.dtype)
