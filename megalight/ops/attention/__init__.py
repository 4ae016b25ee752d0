"""Scaled dot-product attention over packed sequences: the public op, its reference, and the kernels of torch.

These are ``scaled_dot_product_attention``, cuDNN's dense kernel, the packed flash kernel, and flex attention. The
second is nearly twice as fast on Hopper as torch's flash kernel. We call its operator directly: to choose it with
``sdpa_kernel`` would set process-wide flags at every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from megalight.errors import LayoutError
from megalight.ops.attention import hopper, variants
from megalight.ops.attention.batch_invariant import PagedAttentionOptions, invariant_attention, pages_of
from megalight.ops.attention.variants import chunked
from megalight.ops.attention.variants import mutual_attention as mutual_attention
from megalight.ops.batch_invariant import MODE, refuse, with_gradient_of
from megalight.ops.common import (
    HALF,
    cuda_why_not,
    heads_why_not,
    lazy,
    mask,
    serve_all,
    softmax,
    triton_heads_why_not,
    triton_why_not,
    wide,
)
from megalight.registry import Backend, BackendRegistry, choose
from megalight.types import PackedSequences, to_device


class AttentionSpec(NamedTuple):
    """A request to attention.

    Attributes:
        device: device type.
        dtype: dtype of queries, keys and values.
        head_dim: size of a query and key head.
        value_dim: size of a value head.
        grouped: whether there are fewer key heads than query heads.
        uniform: whether all sequences are equally long, and their keys too.
        square: whether queries and keys are the same tokens. If not, causal masks align bottom-right.
        causal: whether a query sees no later key.
        window: whether a query sees only a limited number of earlier keys.
        softcap: whether scores are capped.
        dropout: whether attention weights are dropped.
        sink: whether the softmax has sinks.
        few: whether there are fewer queries than keys, and only a few of each sequence, as in decoding.
        swift: whether the kernels for Hopper serve both passes, and are faster than cuDNN's for these lengths and heads
            (:data:`megalight.ops.attention.hopper.LONGER`, :data:`megalight.ops.attention.hopper.UNEVEN`). Not asked
            where cuDNN cannot serve.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    grouped: bool
    uniform: bool
    square: bool
    causal: bool
    window: bool
    softcap: bool
    dropout: bool
    sink: bool
    few: bool = False
    swift: bool = False


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


FEW = 64
"""Queries per sequence below which a kernel should divide keys, not queries, over SMs."""

ATTENTION: BackendRegistry[AttentionSpec, Callable[..., Tensor]] = BackendRegistry("attention")
REGISTRIES: tuple[BackendRegistry[AttentionSpec, Any], ...] = (ATTENTION,)
EXAMPLE = AttentionSpec("cpu", torch.bfloat16, 128, 128, True, True, True, True, False, False, False, False)


def _sdpa_why_not(spec: AttentionSpec) -> str | None:
    if spec.softcap:
        return "has no soft cap on scores"
    return "has no sinks" if spec.sink else None


def _kernel_why_not(spec: AttentionSpec, widest: int) -> str | None:
    """Return what both CUDA kernels, the dense and the packed one, cannot serve."""
    heads = heads_why_not(spec.dtype, spec.head_dim, spec.value_dim, widest)
    return heads or _sdpa_why_not(spec) or cuda_why_not(spec.device)


WIDER = 192
"""Features of queries and keys that cuDNN serves on Hopper, beside at most 128 of values."""
SINCE = 91000
"""First version of cuDNN that torch trusts with heads of more than 128 features."""


@lru_cache
def wider_heads(device: str) -> bool:
    """Return whether cuDNN has kernels for heads of up to ``WIDER`` features: on Hopper, and in newer versions."""
    if cuda_why_not(device) is not None:
        return False
    version = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return torch.cuda.get_device_capability() == (9, 0) and version >= SINCE


def _cudnn_why_not(spec: AttentionSpec) -> str | None:
    if not spec.uniform:
        return "needs equally long sequences"
    if not spec.square:
        return "has no bottom-right causal mask, and compiles a new kernel for every number of keys"
    if spec.window:
        return "has no window"
    if spec.value_dim < spec.head_dim <= WIDER and not spec.head_dim % 8 and wider_heads(spec.device):
        spec = spec._replace(head_dim=spec.value_dim)  # heads of latent attention, whose values need no padding
    return _kernel_why_not(spec, 128) or (
        None if torch._C._get_cudnn_sdp_enabled() else "torch.backends.cuda.enable_cudnn_sdp(False) switched it off"
    )


def _cudnn_slower(spec: AttentionSpec) -> str | None:
    return "our kernels for Hopper are faster" if spec.swift else None


def _varlen_why_not(spec: AttentionSpec) -> str | None:
    if spec.value_dim < spec.head_dim:
        spec = spec._replace(value_dim=spec.head_dim)  # values are padded
    return _kernel_why_not(spec, 256)


def _triton_why_not(spec: AttentionSpec) -> str | None:
    if spec.dropout:
        return "has no dropout"
    if spec.few:
        return "has one program for all keys of a query, which is slow where queries are few"
    return triton_heads_why_not(spec.device, spec.dtype, spec.head_dim, spec.value_dim)


def _triton_slower(spec: AttentionSpec) -> str | None:
    if spec.uniform and spec.square and not (spec.window or spec.softcap or spec.swift):
        return "the kernels of cuDNN are faster without windows, soft caps and packed sequences"
    return None


def _flex_why_not(spec: AttentionSpec) -> str | None:
    if not spec.softcap:
        return "serves attention with a soft cap only: others are faster without"
    if not spec.square:
        return "has masks of whole sequences: with a cache, every step would need a new one"
    if spec.dropout or spec.sink:
        return f"has no {'dropout' if spec.dropout else 'sinks'}"
    if spec.dtype not in HALF or spec.head_dim % 16 or spec.value_dim % 16 or max(spec.head_dim, spec.value_dim) > 256:
        return f"needs heads of a multiple of 16 up to 256 in half types, not {spec.head_dim} in {spec.dtype}"
    return cuda_why_not(spec.device) or triton_why_not(spec.device, spec.dtype)


def _block_why_not(spec: AttentionSpec) -> str | None:
    if not spec.sink:
        return "serves attention with sinks only: others are faster without"
    if spec.softcap:
        return "has no soft cap on scores"
    return "has no dropout" if spec.dropout else None


ATTENTION.register(Backend("cudnn", cudnn_attention, 30, _cudnn_why_not, slower=_cudnn_slower))
_triton = lazy("megalight.ops.attention.triton", "attention")
ATTENTION.register(Backend("triton", _triton, 25, _triton_why_not, slower=_triton_slower))
ATTENTION.register(Backend("varlen", varlen_attention, 20, _varlen_why_not))
ATTENTION.register(Backend("sdpa", sdpa_attention, 10, _sdpa_why_not))
ATTENTION.register(Backend("flex", flex_attention, 7, _flex_why_not))
ATTENTION.register(Backend("block", variants.sink_attention, 5, _block_why_not))
ATTENTION.register(Backend("reference", reference_attention, 0, serve_all))


_paged = lazy("megalight.ops.paged_attention.triton", "paged_attention")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sink: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``softmax(q k^T * scale) v`` within each sequence.

    Args:
        q: ``[Tq, H, D]``.
        k: ``[Tk, Hkv, D]``; ``H`` is a multiple of ``Hkv`` (grouped-query attention).
        v: ``[Tk, Hkv, Dv]``.
        sequences: how queries divide into sequences. If keys differ, ``sequences.keys`` describes them, and queries are
            the last tokens of their keys' sequence (bottom-right causal alignment).
        causal: whether a query sees no later key.
        scale: factor on scores; ``1 / sqrt(D)`` by default.
        window: number of earlier tokens that a query sees besides itself. None: all.
        chunk: a query sees only keys of its own chunk of so many tokens; a sequence begins with a chunk. None: all.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        dropout: probability to drop a weight. Pass 0 outside of training.
        sink: ``[H]``: the denominator of a head's softmax has one more term, ``e^sink``. So weights add up to less
            than 1 (https://arxiv.org/abs/2309.17453). None: no sink.
        backend: name of a backend.

    Returns:
        ``[Tq, H, Dv]``.

    Raises:
        LayoutError: the numbers of heads do not divide, or the tokens are a context-parallel share.
        BackendError: no backend can serve, or the named one cannot.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % kv_heads:
        raise LayoutError(
            f"there are {heads} query heads and {kv_heads} key heads; the first must be a multiple of the second."
        )
    if sequences.context is not None:
        raise LayoutError(
            "these tokens are a context-parallel share, and plain attention does not see the other shares. Call "
            "parallelize() on a mesh with cp > 1 and a plan that has ContextRegion() for the model's attention."
        )
    if MODE.on:
        if dropout:
            refuse("dropout of attention weights")

        def ordinary(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
            return attention(
                *(q, k, v, sequences),
                causal=causal,
                scale=scale,
                window=window,
                chunk=chunk,
                softcap=softcap,
                sink=sink,
                backend=backend,
            )

        def invariant(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
            options = PagedAttentionOptions(causal, scale, window, chunk, softcap, sink)
            return invariant_attention(_paged, q, k, v, pages_of(sequences), options)

        return with_gradient_of(ordinary, invariant, (q, k, v, sink))
    keys = sequences.keys
    if chunk is not None:
        sequences, rows = chunked(sequences, chunk)
        keys = sequences.keys
        if rows is not None:
            k, v = k.index_select(0, rows), v.index_select(0, rows)
    uniform = sequences.uniform is not None and (keys is None or keys.uniform is not None)
    spec = AttentionSpec(
        q.device.type,
        q.dtype,
        q.shape[-1],
        v.shape[-1],
        heads != kv_heads,
        uniform,
        keys is None,
        causal,
        window is not None,
        softcap is not None,
        dropout > 0,
        sink is not None,
        keys is not None and sequences.num_tokens < FEW * len(sequences.lengths),
        uniform
        and keys is None
        and not dropout
        and q.device.type in hopper.DEVICES
        and hopper.beats_cudnn(q, k, v, sequences, causal, window),
    )
    # backends that have no sinks do not take one
    more = () if sink is None else (sink,)
    return choose(ATTENTION, spec, backend)(q, k, v, sequences, causal, scale, window, softcap, dropout, *more)
