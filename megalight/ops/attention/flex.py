"""Attention by torch's flex attention, a compiled kernel with any function of the scores: it serves soft caps.

The pack is one row of ``T`` tokens. A mask of blocks keeps sequences apart, and blocks of which nothing is seen cost
nothing. It is made once for all layers of a pass that see the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megalight.types import PackedSequences, to_device


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
    """Attention of all sequences in one kernel."""
    visible = _visible(sequences.lengths, causal, window, q.device)
    # `[1, H, T, D]`
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    out: Tensor = _on(q.device.type)[1](
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=visible,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


@lru_cache
def _on(device: str) -> tuple[Callable[..., BlockMask], Callable[..., Any]]:
    """Return what makes masks, and the kernel; compiled on a GPU. Elsewhere it stores all scores, as for tests."""
    if device != "cuda":
        return create_block_mask, flex_attention
    return torch.compile(create_block_mask), torch.compile(flex_attention)


@lru_cache(maxsize=16)
def _capped(softcap: float) -> Callable[..., Tensor]:
    """Return the function of a score. One object for one cap: another one would be compiled again."""

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


# Cached by lengths, which are on the host: all layers of a pass, and all steps of equally long sequences, share a mask.
@lru_cache(maxsize=16)
def _visible(lengths: tuple[int, ...], causal: bool, window: int | None, device: torch.device) -> BlockMask:
    """Return the mask. Made in inference mode, its tensors could not be saved for backward."""
    tokens = sum(lengths)
    with torch.inference_mode(False), torch.no_grad():
        sizes, numbers = to_device(lengths, torch.int64, device), torch.arange(len(lengths), device=device)
        sequence = torch.repeat_interleave(numbers, sizes, output_size=tokens)

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = sequence[query] == sequence[key]
            if causal:
                seen = seen & (query >= key)
            if window is not None:
                seen = seen & (query - key <= window)
            return seen

        return _on(device.type)[0](sees, None, None, tokens, tokens, device=device)
