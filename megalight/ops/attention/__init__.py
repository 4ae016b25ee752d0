"""Scaled dot-product attention over packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.errors import LayoutError
from megalight.ops.attention import hopper, torch_kernels, variants
from megalight.ops.attention.batch_invariant import AttentionOptions, invariant_attention, pages_of
from megalight.ops.attention.torch_kernels import reference_attention
from megalight.ops.attention.variants import chunked
from megalight.ops.attention.variants import mutual_attention as mutual_attention
from megalight.ops.batch_invariant import MODE, refuse, with_gradient_of
from megalight.ops.common import (
    HALF,
    cuda_why_not,
    heads_why_not,
    lazy,
    serve_all,
    triton_heads_why_not,
    triton_why_not,
)
from megalight.registry import Backend, BackendRegistry, choose
from megalight.types import PackedSequences


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


ATTENTION.register(Backend("cudnn", torch_kernels.cudnn_attention, 30, _cudnn_why_not, slower=_cudnn_slower))
_triton = lazy("megalight.ops.attention.triton", "attention")
ATTENTION.register(Backend("triton", _triton, 25, _triton_why_not, slower=_triton_slower))
ATTENTION.register(Backend("varlen", torch_kernels.varlen_attention, 20, _varlen_why_not))
ATTENTION.register(Backend("sdpa", torch_kernels.sdpa_attention, 10, _sdpa_why_not))
ATTENTION.register(Backend("flex", torch_kernels.flex_attention, 7, _flex_why_not))
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
            options = AttentionOptions(causal, scale, window, chunk, softcap)
            return invariant_attention(_paged, q, k, v, pages_of(sequences), options, sink)

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
        uniform and keys is None and not dropout and hopper.beats_cudnn(q, k, v, sequences, causal, window),
    )
    # backends that have no sinks do not take one
    more = () if sink is None else (sink,)
    return choose(ATTENTION, spec, backend)(q, k, v, sequences, causal, scale, window, softcap, dropout, *more)
