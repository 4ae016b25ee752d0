"""Attention backends of torch: scaled_dot_product_attention, cuDNN, the packed flash kernel, and flex attention.

cuDNN's dense kernel is nearly twice as fast on Hopper as torch's flash kernel. We call its operator directly: to choose
it with ``sdpa_kernel`` would set process-wide flags at every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from megalight.ops.common import mask, wide
from megalight.types import PackedSequences, to_device


def sdpa_attention(
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


def cudnn_attention(
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
        return sdpa_attention(q, k, v, sequences, causal, scale, window, softcap, dropout)
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


def varlen_attention(
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
    """Attention of all sequences in one kernel; causal masks align bottom-right.

    We call the operator behind ``torch.nn.attention.varlen`` directly: the public function changed its arguments
    between torch 2.10 and 2.13 and has no dropout.
    """
    keys = sequences.keys or sequences
    # the kernel has one size of heads: values of latent attention, which are narrower, get features of 0
    missing = q.shape[-1] - v.shape[-1]
    v = F.pad(v, (0, missing)) if missing else v
    plain = causal and window is None
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        sequences.cu_seqlens,
        keys.cu_seqlens,
        sequences.max_length,
        keys.max_length,
        dropout,
        plain,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window,
        window_size_right=0 if causal else -1,
    )[0]
    return out[..., :-missing] if missing else out


def flex_attention(
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
    """Attention of all sequences in one kernel.

    The pack is one row of ``T`` tokens. A mask of blocks keeps sequences apart, and blocks of which nothing is seen
    cost nothing. It is made once for all layers of a pass that see the same.
    """
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
        return create_block_mask, torch_flex_attention
    return torch.compile(create_block_mask), torch.compile(torch_flex_attention)


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


def softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax of ``scores [..., H, Tq, Tk]``; ``e^sink`` of each head ``[H]`` is one more term of the denominator."""
    if sink is None:
        return scores.softmax(-1)
    # a last column, which has no value; so the maximum that is subtracted includes it
    column = sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def reference_attention(
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
