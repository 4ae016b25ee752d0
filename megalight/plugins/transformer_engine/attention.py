"""Attention by TransformerEngine's ``DotProductAttention``, which takes cuDNN's fused kernel or flash-attn."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention import Spec
from megalight.ops.common import HALF
from megalight.plugins.transformer_engine.package import PACKAGE, TORCH
from megalight.plugins.transformer_engine.package import why_not as package_why_not
from megalight.types import PackedSequences

MINIMUM = "2.3"
WIDEST = 256
STEP = 64
"""Longest lengths of ragged batches are rounded up to a multiple of this: cuDNN compiles a kernel for each length."""


def why_not(spec: Spec) -> str | None:
    """Return why it cannot serve attention, or None."""
    if spec.softcap:
        return "has no soft cap on scores"
    if spec.sink:
        return "has no sinks"
    if spec.window and not spec.causal:
        return "has a window with causal attention only"
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    if max(spec.head_dim, spec.value_dim) > WIDEST or spec.head_dim % 8 or spec.value_dim % 8:
        return f"needs heads of a multiple of 8 up to {WIDEST}, not {spec.head_dim}, {spec.value_dim}"
    return package_why_not(spec.device, "attention", MINIMUM, f"{TORCH}:DotProductAttention")


@lru_cache(maxsize=64)
def _module(
    heads: int, kv_heads: int, dims: tuple[int, int], dropout: float, scale: float | None, kind: str, trains: bool
) -> Any:
    """Make a module without parameters. Layers with equal arguments share it."""
    make = PACKAGE.load(f"{TORCH}:DotProductAttention")
    made = make(
        heads, dims, num_gqa_groups=kv_heads, attention_dropout=dropout, softmax_scale=scale, attention_type=kind
    )
    return made.train(trains)


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
    """Equally long sequences as ``[B, S, H, D]``, others packed as ``[T, H, D]``."""
    keys = sequences.keys or sequences
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    module = _module(
        q.shape[1],
        k.shape[1],
        (q.shape[2], v.shape[2]),
        dropout,
        scale,
        "self" if sequences.keys is None else "cross",
        needs_gradient or dropout > 0,  # under recompute, the first forward drops weights without a graph
    )
    # Queries after a cache are the last positions of their sequence: align the mask at the bottom right.
    mask = ("causal" if sequences.keys is None else "causal_bottom_right") if causal else "no_mask"
    options: dict[str, Any] = {"window_size": (-1 if window is None else window, 0 if causal else -1)}
    if sequences.uniform is not None and keys.uniform is not None:
        batch = sequences.uniform[0]
        q, k, v = (t.view(batch, -1, *t.shape[1:]) for t in (q, k, v))
        options |= {"qkv_format": "bshd", "attn_mask_type": mask}
    else:
        options |= {
            "qkv_format": "thd",
            "attn_mask_type": f"padding_{mask}" if causal else "padding",
            "cu_seqlens_q": sequences.cu_seqlens,
            "cu_seqlens_kv": keys.cu_seqlens,
            # Only a bound for the kernel; offsets say where sequences end.
            "max_seqlen_q": -(-sequences.max_length // STEP) * STEP,
            "max_seqlen_kv": -(-keys.max_length // STEP) * STEP,
            "pad_between_seqs": False,
        }
    out: Tensor = module(q, k, v, **options)
    return out.reshape(sequences.num_tokens, -1, v.shape[-1])
