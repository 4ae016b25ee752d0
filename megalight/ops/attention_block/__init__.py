"""Attention to some of the keys, with the log-sum-exp that lets blocks be merged; and its gradient.

A block is what one device computes of attention whose keys are spread over several (arXiv 2310.01889). Outputs of
blocks are merged by :func:`megalight.ops.attention_merge.merge_`. Given the *merged* output and log-sum-exp, the
gradients of the blocks add up to the gradient of the whole.
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
    """What a block must serve.

    Attributes:
        device: device type.
        dtype: type of queries, keys and values.
        head_dim: features of a query and key head.
        value_dim: features of a value head.
        dense: rows of a batch are sequences, all equally long; otherwise they are packed.
        single: the sequences have but one query or key each.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    dense: bool
    single: bool


Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]

ATTENTION_BLOCK: BackendRegistry[Spec, Forward] = BackendRegistry("attention_block")
ATTENTION_BLOCK_BACKWARD: BackendRegistry[Spec, Backward] = BackendRegistry("attention_block_backward")
REGISTRIES: tuple[BackendRegistry[Spec, Any], ...] = (ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD)
EXAMPLE = Spec("cpu", torch.bfloat16, 128, 128, True, False)


def _kernel_why_not(spec: Spec, widest: int) -> str | None:
    """What both CUDA kernels refuse."""
    heads = heads_why_not(spec.dtype, spec.head_dim, spec.value_dim, widest)
    return heads or cuda_why_not(spec.device)


def _cudnn_why_not(spec: Spec) -> str | None:
    if not spec.dense:
        return "needs equally long sequences"
    if spec.single:
        return "needs two queries and keys of each sequence"
    return _kernel_why_not(spec, 128) or (
        None if torch._C._get_cudnn_sdp_enabled() else "torch.backends.cuda.enable_cudnn_sdp(False) switched it off"
    )


def _varlen_why_not(spec: Spec) -> str | None:
    return _kernel_why_not(spec, 256)


ATTENTION_BLOCK.register(Backend("cudnn", cudnn.forward, 20, _cudnn_why_not))
ATTENTION_BLOCK.register(Backend("varlen", varlen.forward, 10, _varlen_why_not))
ATTENTION_BLOCK.register(Backend("reference", reference.forward, 0, serve_all))
ATTENTION_BLOCK_BACKWARD.register(Backend("cudnn", cudnn.backward, 20, _cudnn_why_not))
ATTENTION_BLOCK_BACKWARD.register(Backend("varlen", varlen.backward, 10, _varlen_why_not))
ATTENTION_BLOCK_BACKWARD.register(Backend("reference", reference.backward, 0, serve_all))


@remembered
def _choose(registry: BackendRegistry[Spec, Callable[..., Any]], spec: Spec, backend: str) -> Callable[..., Any]:
    return registry.select(spec, backend).fn


def _spec(q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences | None, causal: bool) -> Spec:
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads:
        raise LayoutError(f"{heads} query heads cannot share {kv_heads} key heads; the first must be a multiple.")
    if causal and (q.shape[1] != k.shape[1] or (sequences is not None and sequences.keys is not None)):
        raise LayoutError(
            f"a causal block has as many keys as queries, not {k.shape[1]} and {q.shape[1]}; cut what no query sees."
        )
    dense = sequences is None
    single = dense and min(q.shape[1], k.shape[1]) < 2
    return Spec(q.device.type, q.dtype, q.shape[-1], v.shape[-1], dense, single)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences | None = None,
    *,
    causal: bool,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``softmax(q k^T * scale) v`` over the given keys only, and the log-sum-exp of the scores. Not differentiable.

    Args:
        q: ``[B, S, H, D]``; where ``sequences`` is given, ``[1, T, H, D]``.
        k: ``[B, Sk, Hkv, D]``; ``H`` is a multiple of ``Hkv``. Like all inputs it may be a view with strides.
        v: ``[B, Sk, Hkv, Dv]``.
        sequences: how packed queries, and by ``sequences.keys`` keys, divide into sequences. None: each row of the
            batch is one.
        causal: query ``i`` sees keys up to ``i``; there must be as many of both.
        scale: factor on scores; ``1 / sqrt(D)`` by default.
        backend: a backend's name.

    Returns:
        output ``[B, S, H, Dv]``, and log-sum-exp ``[B, H, S]`` in float32 (float64 for float64).

    Raises:
        LayoutError: head counts that do not divide, or a causal block that is not square.
        BackendError: no backend can serve, or the named one cannot.
    """
    fn = _choose(ATTENTION_BLOCK, _spec(q, k, v, sequences, causal), backend)
    result: tuple[Tensor, Tensor] = fn(q, k, v, sequences, causal, scale)
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
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """What a block adds to the gradients of queries, keys and values.

    Args:
        grad_out: ``[B, S, H, Dv]``, gradient of the merged output.
        q: as in :func:`block_attention`, like ``k``, ``v``, ``sequences``, ``causal``, ``scale`` and ``backend``.
        k: keys.
        v: values.
        out: ``[B, S, H, Dv]``, the output merged over all blocks.
        lse: ``[B, H, S]``, the log-sum-exp merged over all blocks.
        sequences: how packed tokens divide.
        causal: query ``i`` sees keys up to ``i``.
        scale: factor on scores.
        backend: a backend's name.

    Returns:
        gradients in the shapes of ``q``, ``k`` and ``v``.

    Raises:
        LayoutError: as in :func:`block_attention`.
        BackendError: no backend can serve, or the named one cannot.
    """
    fn = _choose(ATTENTION_BLOCK_BACKWARD, _spec(q, k, v, sequences, causal), backend)
    result: tuple[Tensor, Tensor, Tensor] = fn(grad_out, q, k, v, out, lse, sequences, causal, scale)
    return result
