"""Attention over a block of the keys, with the log-sum-exp that is needed to merge blocks, and its gradient.

In ring attention (https://arxiv.org/abs/2310.01889) keys are spread over devices, and each device computes blocks.
:func:`megalight.ops.attention_merge.merge` merges the outputs. With the *merged* output and log-sum-exp, the gradients
of the blocks sum to the gradient of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.errors import LayoutError
from megalight.ops.attention_block import torch_kernels
from megalight.ops.attention_block.torch_kernels import packed, reference_backward, reference_forward
from megalight.ops.batch_invariant import refuse
from megalight.ops.common import cuda_why_not, heads_why_not, lazy, serve_all, triton_heads_why_not
from megalight.registry import Backend, BackendRegistry, choose
from megalight.types import PackedSequences


class AttentionBlockSpec(NamedTuple):
    """A request to block attention.

    Attributes:
        device: device type.
        dtype: dtype of queries, keys and values.
        head_dim: size of a query and key head.
        value_dim: size of a value head.
        dense: whether the rows of the batch are sequences of equal length. If not, sequences are packed.
        single: whether each sequence has only one query or one key.
        window: whether a query sees only a limited number of earlier keys.
        swift: whether queries of a dense block see so many keys that the backward kernels for Hopper serve, and are
            faster than cuDNN's.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    dense: bool
    single: bool
    window: bool
    swift: bool = False


Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]

ATTENTION_BLOCK: BackendRegistry[AttentionBlockSpec, Forward] = BackendRegistry("attention_block")
ATTENTION_BLOCK_BACKWARD: BackendRegistry[AttentionBlockSpec, Backward] = BackendRegistry("attention_block_backward")
REGISTRIES: tuple[BackendRegistry[AttentionBlockSpec, Any], ...] = (ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD)
LONG = 8192
"""Keys that a query sees on average from which the backward kernels for Hopper serve dense blocks. On an H200, with 32
query heads, cuDNN took 1.00 to 1.06 of their time for 4096 queries and 16,384 keys, 1.04 to 1.09 for 16,384 queries and
as many keys or four times as many, and 0.71 for 1024 and 4096. Its forward kernels are as fast as ours, or faster."""
EXAMPLE = AttentionBlockSpec("cpu", torch.bfloat16, 128, 128, True, False, False)


def _kernel_why_not(spec: AttentionBlockSpec, widest: int) -> str | None:
    """Return what both CUDA kernels cannot serve."""
    heads = heads_why_not(spec.dtype, spec.head_dim, spec.value_dim, widest)
    return heads or cuda_why_not(spec.device)


def _cudnn_why_not(spec: AttentionBlockSpec) -> str | None:
    if not spec.dense:
        return "needs equally long sequences"
    if spec.single:
        return "needs at least two queries and two keys per sequence"
    if spec.window:
        return "has no window"
    return _kernel_why_not(spec, 128) or (
        None if torch._C._get_cudnn_sdp_enabled() else "torch.backends.cuda.enable_cudnn_sdp(False) switched it off"
    )


def _cudnn_slower(spec: AttentionBlockSpec) -> str | None:
    return "our backward kernels for Hopper are faster" if spec.swift else None


def _triton_why_not(spec: AttentionBlockSpec) -> str | None:
    return triton_heads_why_not(spec.device, spec.dtype, spec.head_dim, spec.value_dim)


def _triton_slower(spec: AttentionBlockSpec) -> str | None:
    plain = spec.dense and not spec.window
    return "the kernels of cuDNN are faster for dense blocks without windows" if plain else None


def _triton_backward_slower(spec: AttentionBlockSpec) -> str | None:
    return None if spec.swift else _triton_slower(spec)


def _varlen_why_not(spec: AttentionBlockSpec) -> str | None:
    # Narrower values can be widened to the kernel's one size of heads; wider ones cannot.
    if spec.value_dim < spec.head_dim:
        spec = spec._replace(value_dim=spec.head_dim)  # values are padded
    return _kernel_why_not(spec, 256)


def _lazy(name: str) -> Callable[..., Any]:
    return lazy("megalight.ops.attention_block.triton", name)


ATTENTION_BLOCK.register(Backend("cudnn", torch_kernels.cudnn_forward, 20, _cudnn_why_not))
ATTENTION_BLOCK.register(Backend("triton", _lazy("forward"), 15, _triton_why_not, slower=_triton_slower))
ATTENTION_BLOCK.register(Backend("varlen", torch_kernels.varlen_forward, 10, _varlen_why_not))
ATTENTION_BLOCK.register(Backend("reference", reference_forward, 0, serve_all))
ATTENTION_BLOCK_BACKWARD.register(
    Backend("cudnn", torch_kernels.cudnn_backward, 20, _cudnn_why_not, slower=_cudnn_slower)
)
ATTENTION_BLOCK_BACKWARD.register(
    Backend("triton", _lazy("backward"), 15, _triton_why_not, slower=_triton_backward_slower)
)
ATTENTION_BLOCK_BACKWARD.register(Backend("varlen", torch_kernels.varlen_backward, 10, _varlen_why_not))
ATTENTION_BLOCK_BACKWARD.register(Backend("reference", reference_backward, 0, serve_all))


# Imported when it is asked: attention imports this module.
_beats_cudnn = lazy("megalight.ops.attention.hopper", "beats_cudnn")


def _spec(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences | None, causal: bool, window: int | None
) -> AttentionBlockSpec:
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads:
        raise LayoutError(
            f"there are {heads} query heads and {kv_heads} key heads; the first must be a multiple of the second."
        )
    aligned = sequences is not None and sequences.keys is not None
    # Kernels align masks at different corners; a square block is the same for all of them.
    if causal and not aligned and q.shape[1] != k.shape[1]:
        raise LayoutError(
            f"a causal block has {q.shape[1]} queries and {k.shape[1]} keys; their numbers must be equal. Remove the "
            "keys that no query sees."
        )
    dense = sequences is None
    single = dense and min(q.shape[1], k.shape[1]) < 2
    swift = dense and _beats_cudnn(q, k, v, packed(q, k), causal, window, LONG)
    return AttentionBlockSpec(
        q.device.type, q.dtype, q.shape[-1], v.shape[-1], dense, single, window is not None, swift
    )


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences | None = None,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute ``softmax(q k^T * scale) v`` over these keys, and the log-sum-exp of the scores. Not differentiable.

    All inputs may be views with strides.

    Args:
        q: ``[B, S, H, D]``, or ``[1, T, H, D]`` with ``sequences``.
        k: ``[B, Sk, Hkv, D]``; ``H`` is a multiple of ``Hkv``.
        v: ``[B, Sk, Hkv, Dv]``.
        sequences: how packed queries, and with ``sequences.keys`` packed keys, divide into sequences. None: each row of
            the batch is a sequence.
        causal: whether query ``i`` sees only keys up to ``i``. The numbers of queries and keys must then be equal. If
            ``sequences.keys`` describes the keys, they need not: queries are the last tokens of their keys' sequence.
        scale: factor on scores; ``1 / sqrt(D)`` by default.
        window: number of earlier keys that a query sees besides its own; for causal blocks. None: all.
        backend: name of a backend.

    Returns:
        the output ``[B, S, H, Dv]``, and the log-sum-exp ``[B, H, S]`` in float32 (float64 for float64).

    Raises:
        LayoutError: the numbers of heads do not divide, or a causal block without ``sequences.keys`` is not square.
        BackendError: no backend can serve, or the named one cannot.
    """
    refuse("attention in blocks of keys (context parallelism)")
    fn = choose(ATTENTION_BLOCK, _spec(q, k, v, sequences, causal, window), backend)
    result: tuple[Tensor, Tensor] = fn(q, k, v, sequences, causal, scale, window)
    return result


def block_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: PackedSequences | None = None,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what a block adds to the gradients of queries, keys and values.

    Arguments that are not listed are as in :func:`block_attention`.

    Args:
        grad_out: ``[B, S, H, Dv]``: gradient of the merged output.
        q: queries.
        k: keys.
        v: values.
        out: ``[B, S, H, Dv]``: the output, merged over all blocks.
        lse: ``[B, H, S]``: the log-sum-exp, merged over all blocks.
        sequences: how packed tokens divide into sequences.
        causal: whether query ``i`` sees only keys up to ``i``.
        scale: factor on scores.
        window: number of earlier keys that a query sees besides its own.
        backend: name of a backend.

    Returns:
        gradients in the shapes of ``q``, ``k`` and ``v``.

    Raises:
        LayoutError: as in :func:`block_attention`.
        BackendError: no backend can serve, or the named one cannot.
    """
    fn = choose(ATTENTION_BLOCK_BACKWARD, _spec(q, k, v, sequences, causal, window), backend)
    result: tuple[Tensor, Tensor, Tensor] = fn(grad_out, q, k, v, out, lse, sequences, causal, scale, window)
    return result
