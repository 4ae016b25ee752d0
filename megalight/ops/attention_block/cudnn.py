"""Dense blocks by cuDNN. On Hopper it is nearly twice as fast as torch's flash kernel.

We call the operators behind ``scaled_dot_product_attention`` directly, because they return and take the log-sum-exp.
cuDNN accepts any strides, so views into larger tensors need no copy. torch caches cuDNN's kernels by the strides of
queries, keys and values only. So the output, its gradient and the log-sum-exp must always have one layout: we make them
contiguous. They already are, unless a caller cuts a batch along its sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.types import PackedSequences

aten = torch.ops.aten


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences | None,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a block; tensors ``[B, S, H, D]`` are viewed as ``[B, H, S, D]``."""
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    # `True` asks for the log-sum-exp, which the merge and the backward need; 0.0 is the dropout.
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse.squeeze(-1)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: PackedSequences | None,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block, from the merged ``out`` and ``lse``."""
    # `out` and `lse` are those over all blocks: exp(S - lse) is then this block's share of the whole softmax.
    query, key, value, output, grad = (t.transpose(1, 2) for t in (q, k, v, out.contiguous(), grad_out.contiguous()))
    no_dropout = lse.new_empty(0)
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, output, lse.contiguous().unsqueeze(-1), no_dropout, no_dropout, None, None, None,
        q.shape[1], k.shape[1], 0.0, causal, scale=scale,
    )  # fmt: skip
    grad_q, grad_k, grad_v = (t.transpose(1, 2) for t in grads)
    return grad_q, grad_k, grad_v
