"""Blocks by the kernels of :mod:`megalight.ops.attention.triton`, dense or packed.

These kernels have the log-sum-exp in units of log 2, head by head over all tokens.
"""

from __future__ import annotations

from torch import Tensor

from megalight.ops.attention import triton
from megalight.ops.attention.triton_blocks import LOG2E, describable
from megalight.ops.attention_block.torch_kernels import packed
from megalight.types import PackedSequences


def _rows(x: Tensor) -> Tensor:
    """Return ``[B, S, H, D]`` as tokens that the kernels can load."""
    rows = x.flatten(0, 1)
    return rows if describable(rows) else rows.contiguous()


def _folded(rows: Tensor, like: Tensor) -> Tensor:
    """View tokens as batches of as many sequences as ``like`` has."""
    return rows.view(len(like), -1, *rows.shape[1:])


def _options(q: Tensor, causal: bool, scale: float | None, window: int | None) -> triton.Options:
    return causal, q.shape[-1] ** -0.5 if scale is None else scale, window, None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences | None,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of all sequences in one kernel."""
    sequences, options = sequences or packed(q, k), _options(q, causal, scale, window)
    out, lse = triton.run_forward(_rows(q), _rows(k), _rows(v), None, sequences, options)
    sums = (lse / LOG2E).view(len(lse), len(q), -1).transpose(0, 1)
    return _folded(out, q), sums.contiguous()


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
    sequences, options = sequences or packed(q, k), _options(q, causal, scale, window)
    grad, out = (_rows(x.contiguous()) for x in (grad_out, out))
    sums = (lse * LOG2E).transpose(0, 1).flatten(1).contiguous()
    found = triton.run_backward(grad, _rows(q), _rows(k), _rows(v), out, sums, sequences, options)
    grad_q, grad_k, grad_v = (_folded(part, q) for part in found[:3])
    return grad_q, grad_k, grad_v
