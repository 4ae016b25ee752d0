"""TransformerEngine's ``DotProductAttention``: attention by cuDNN's fused kernel or flash-attn, in bf16 and in FP8."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.errors import LayoutError, MissingPackageError
from megalight.ops.attention import AttentionSpec
from megalight.ops.common import HALF
from megalight.ops.fp8_attention import Attend, FP8AttentionSpec, sizes_why_not
from megalight.plugins.transformer_engine.kernels import PACKAGE, TORCH
from megalight.plugins.transformer_engine.kernels import why_not as package_why_not
from megalight.types import PackedSequences

MINIMUM = "2.3"
WIDEST = 256
STEP = 64
"""Longest lengths of ragged batches are rounded up to a multiple of this: cuDNN compiles a kernel for each length."""


def why_not(spec: AttentionSpec) -> str | None:
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


RECIPE = "transformer_engine.common.recipe:Float8CurrentScaling"
FORMATS = "transformer_engine.common.recipe:Format"
FP8_ATTENTION_MINIMUM = "2.8"
"""The first release whose attention takes scales by current values."""


def fp8_attention_why_not(spec: FP8AttentionSpec) -> str | None:
    """Return why it cannot serve, or None.

    On Hopper the package has only kernels with delayed scales, which are not offered: with release 2.12 on an H100
    (cuDNN 9.19), forward and backward of 8192 tokens took 4.5 ms (bf16: 2.5 ms), and after three calls small
    gradients of queries and keys were 42 % wrong.
    """
    if spec.power:
        return "its attention has no scales that are powers of two"
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    reason = package_why_not(
        spec.device, "attention in 8 bits", FP8_ATTENTION_MINIMUM, f"{TORCH}:DotProductAttention", RECIPE
    )
    if reason is not None:
        return reason
    if (major := torch.cuda.get_device_capability()[0]) < 10:
        return f"its attention by current values needs a GPU of compute capability 10.0, not {major}.x"
    return sizes_why_not(spec)


def _autocast(recipe: Any) -> Any:
    """Enter the package's context for 8-bit modules, whose name has changed."""
    try:
        return PACKAGE.load(f"{TORCH}:autocast")(enabled=True, recipe=recipe)
    except MissingPackageError:
        return PACKAGE.load(f"{TORCH}:fp8_autocast")(enabled=True, fp8_recipe=recipe)


def make(spec: FP8AttentionSpec) -> Attend:
    """Make the attention of one layer. Its module has no parameters, but a scale of the gradients of scores."""
    formats = PACKAGE.load(FORMATS)
    recipe = PACKAGE.load(RECIPE)(fp8_format=formats.HYBRID if spec.gradient == "e5m2" else formats.E4M3, fp8_dpa=True)
    modules: dict[tuple[int, int], Any] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, sequences: int) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise LayoutError(
                "fp8_attention: attention of TransformerEngine in 8 bits updates scales on the host's side, and cannot "
                "be recorded as a CUDA graph; leave out the graphs, or fp8_attention."
            )
        key = q.shape[1], k.shape[1]
        if key not in modules:
            modules[key] = PACKAGE.load(f"{TORCH}:DotProductAttention")(
                key[0], spec.head_dim, num_gqa_groups=key[1], attention_dropout=0.0, softmax_scale=spec.scale
            )
        heads = [t.view(sequences, -1, *t.shape[1:]) for t in (q, k, v)]
        with _autocast(recipe):
            out: Tensor = modules[key](*heads, qkv_format="bshd", attn_mask_type="causal" if spec.causal else "no_mask")
        return out.reshape(q.shape)

    return attend
