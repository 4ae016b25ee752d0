"""Attention of packed sequences in Triton, with windows, soft caps and sinks, which cuDNN's dense kernel lacks.

The algorithm is FlashAttention-2 (https://arxiv.org/abs/2307.08691). The forward pass keeps the log-sum-exp of each row
of scores, and the backward pass computes the scores again. Each program has one block of one sequence. Blocks that see
most start first, so that no long one is left at the end. Where a block sees all of another, no mask is computed.

Heads of 128 features have kernels of their own on Hopper (:mod:`megalight.ops.attention.hopper`).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from megalight.ops.attention import backward, forward, hopper, keys
from megalight.ops.attention.blocks import LOG2E, describable
from megalight.ops.common import apply, once_differentiable
from megalight.types import PackedSequences

Options: TypeAlias = tuple[bool, float, int | None, float | None]
"""Whether a query sees no later key, the factor on scores, the window, and the soft cap."""


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
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of all sequences, in one kernel forward and three backward."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x if describable(x) else x.contiguous() for x in (q, k, v))
    out: Tensor = apply(_Attention, q, k, v, sink, sequences, (causal, scale, window, softcap))
    return out


class _Attention(torch.autograd.Function):
    """``q [T, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], sink [H] -> [T, H, Dv]``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, sequences: PackedSequences, options: Options
    ) -> Tensor:
        out, lse = run_forward(q, k, v, sink, sequences, options)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.sequences, ctx.options = sequences, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        *found, delta = run_backward(grad.contiguous(), q, k, v, out, lse, ctx.sequences, ctx.options)
        grad_sink = None
        if sink is not None and ctx.needs_input_grad[3]:
            # A sink is a key whose value is 0.
            grad_sink = -((sink.float()[:, None] * LOG2E - lse).exp2() * delta).sum(1).to(sink.dtype)
        return (*found, grad_sink, None, None)


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, sequences: PackedSequences, options: Options
) -> tuple[Tensor, Tensor]:
    """Return the output ``[T, H, Dv]``, and the log-sum-exp of each row ``[H, T]`` in units of log 2.

    Args:
        q: ``[T, H, D]``. Queries, keys and values are :func:`megalight.ops.attention.blocks.describable`.
        k: ``[Tk, Hkv, D]``.
        v: ``[Tk, Hkv, Dv]``.
        sink: ``[H]``, or None.
        sequences: how tokens divide into sequences.
        options: whether a query sees no later key, the factor on scores, the window, and the soft cap.
    """
    causal, _, window, _ = options
    run = hopper.run_forward if hopper.serves(q, v, sequences, causal, window) else forward.run
    found: tuple[Tensor, Tensor] = run(q, k, v, sink, sequences, *options)
    return found


def run_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: PackedSequences,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, and the sums of outputs times their gradients ``[H, T]``.

    Arguments are as in :func:`run_forward`, and the output, its log-sum-exp and its gradient, which are contiguous.
    """
    causal, _, window, _ = options
    if hopper.serves_backward(q, v, sequences, causal, window):
        found: tuple[Tensor, Tensor, Tensor, Tensor] = hopper.run_backward(grad, q, k, v, out, lse, sequences, *options)
        return found
    delta = backward.run_delta(out, grad)
    args = (grad, q, k, v, lse, delta, sequences, *options)
    of_keys = keys.run if keys.serves(q, v) else backward.of_keys
    return backward.of_queries(*args), *of_keys(*args), delta
