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
from megalight.ops.attention_block import cudnn, reference, varlen
from megalight.ops.common import cuda_why_not, heads_why_not, serve_all
from megalight.registry import Backend, BackendRegistry, remembered
from megalight.types import PackedSequences


class Spec(NamedTuple):
    """A request to block attention.

    Attributes:
        device: device type.
        dtype: dtype of queries, keys and values.
        head_dim: size of a query and key head.
        value_dim: size of a value head.
        dense: whether the rows of the batch are sequences of equal length. If not, sequences are packed.
        single: whether each sequence has only one query or one key.
        window: whether a query sees only a limited number of earlier keys.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    dense: bool
    single: bool
    window: bool


Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]

ATTENTION_BLOCK: BackendRegistry[Spec, Forward] = BackendRegistry("attention_block")
ATTENTION_BLOCK_BACKWARD: BackendRegistry[Spec, Backward] = BackendRegistry("attention_block_backward")
REGISTRIES: tuple[BackendRegistry[Spec, Any], ...] = (ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD)
EXAMPLE = Spec("cpu", torch.bfloat16, 128, 128, True, False, False)


def _kernel_why_not(spec: Spec, widest: int) -> str | None:
    """Return what both CUDA kernels cannot serve."""
    heads = heads_why_not(spec.dtype, spec.head_dim, spec.value_dim, widest)
    return heads or cuda_why_not(spec.device)


def _cudnn_why_not(spec: Spec) -> str | None:
    if not spec.dense:
        return "needs equally long sequences"
    if spec.single:
        return "needs at least two queries and two keys per sequence"
    if spec.window:
        return "has no window"
    return _kernel_why_not(spec, 128) or (
        None if torch._C._get_cudnn_sdp_enabled() else "torch.backends.cuda.enable_cudnn_sdp(False) switched it off"
    )


def _varlen_why_not(spec: Spec) -> str | None:
    # Narrower values can be widened to the kernel's one size of heads; wider ones cannot.
    if spec.value_dim < spec.head_dim:
        spec = spec._replace(value_dim=spec.head_dim)  # values are padded
    return _kernel_why_not(spec, 256)


# cuDNN first: it is faster where it can serve.
ATTENTION_BLOCK.register(Backend("cudnn", cudnn.forward, 20, _cudnn_why_not))
ATTENTION_BLOCK.register(Backend("varlen", varlen.forward, 10, _varlen_why_not))
ATTENTION_BLOCK.register(Backend("reference", reference.forward, 0, serve_all))
ATTENTION_BLOCK_BACKWARD.register(Backend("cudnn", cudnn.backward, 20, _cudnn_why_not))
ATTENTION_BLOCK_BACKWARD.register(Backend("varlen", varlen.backward, 10, _varlen_why_not))
ATTENTION_BLOCK_BACKWARD.register(Backend("reference", reference.backward, 0, serve_all))


@remembered
def _choose(registry: BackendRegistry[Spec, Callable[..., Any]], spec: Spec, backend: str) -> Callable[..., Any]:
    return registry.select(spec, backend).fn


def _spec(q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences | None, causal: bool, window: int | None) -> Spec:
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
    return Spec(q.device.type, q.dtype, q.shape[-1], v.shape[-1], dense, single, window is not None)


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
    fn = _choose(ATTENTION_BLOCK, _spec(q, k, v, sequences, causal, window), backend)
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
    fn = _choose(ATTENTION_BLOCK_BACKWARD, _spec(q, k, v, sequences, causal, window), backend)
    result: tuple[Tensor, Tensor, Tensor] = fn(grad_out, q, k, v, out, lse, sequences, causal, scale, window)
    return result
