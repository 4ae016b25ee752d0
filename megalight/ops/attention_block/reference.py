"""Blocks in plain torch with the whole score matrix, for any dtype. Half types are computed in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megalight.ops.common import mask, wide
from megalight.types import PackedSequences


def _sequences(tensor: Tensor, lengths: tuple[int, ...] | None) -> Iterator[Tensor]:
    """Yield each sequence as ``[heads, S, D]``, in the dtype that sums are computed in."""
    rows = tensor.unbind() if lengths is None else torch.split(tensor[0], list(lengths))
    return (row.transpose(0, 1).to(wide(tensor.dtype)) for row in rows)


def _lengths(sequences: PackedSequences | None) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the lengths of packed queries and keys; None for dense batches."""
    return (None, None) if sequences is None else (sequences.lengths, (sequences.keys or sequences).lengths)


def _factor(scale: float | None, head_dim: int) -> float:
    return 1 / math.sqrt(head_dim) if scale is None else scale


def _scores(query: Tensor, key: Tensor, causal: bool, factor: float, window: int | None) -> Tensor:
    """``[H, S, Sk]``: the scores; minus infinity where a query does not see a key."""
    # Key heads are repeated: neighboring query heads share one.
    scores = query @ key.repeat_interleave(query.shape[0] // key.shape[0], 0).mT * factor
    allowed = mask(query.shape[1], key.shape[1], causal, window, query.device)
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def _pack(parts: list[Tensor], like: Tensor) -> Tensor:
    """Join sequences ``[heads, S, D]`` to ``[B, S, heads, D]``, in the dtype of ``like``."""
    return (
        torch.cat([part.transpose(0, 1) for part in parts]).view(like.shape[0], -1, *parts[0].shape[::2]).to(like.dtype)
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences | None,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, one sequence after the other."""
    lengths, key_lengths = _lengths(sequences)
    factor, outputs, sums = _factor(scale, q.shape[-1]), [], []
    for query, key, value in zip(
        _sequences(q, lengths), _sequences(k, key_lengths), _sequences(v, key_lengths), strict=True
    ):
        scores = _scores(query, key, causal, factor, window)
        sums.append(scores.logsumexp(-1))
        # With the log-sum-exp of this block; a caller with more blocks merges the outputs.
        weights = (scores - sums[-1][..., None]).exp()
        outputs.append(weights @ value.repeat_interleave(query.shape[0] // value.shape[0], 0))
    return _pack(outputs, q), torch.stack(sums) if lengths is None else torch.cat(sums, -1)[None]


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
    """Gradients of a block, one sequence after the other.

    ``P = exp(S - lse)``, ``dV = P^T dO``, ``dS = P * (dO V^T - rowsum(dO * O))``, ``dQ = dS K``, ``dK = dS^T Q``.
    """
    lengths, key_lengths = _lengths(sequences)
    sums = lse.unbind() if lengths is None else torch.split(lse[0], list(lengths), -1)
    factor = _factor(scale, q.shape[-1])
    grads: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    per_query = zip(*(_sequences(t, lengths) for t in (grad_out, q, out)), sums, strict=True)
    per_key = zip(*(_sequences(t, key_lengths) for t in (k, v)), strict=True)
    for (grad, query, output, logs), (key, value) in zip(per_query, per_key, strict=True):
        repeats = query.shape[0] // key.shape[0]
        weights = (_scores(query, key, causal, factor, window) - logs[..., None]).exp()
        # The sum stands for the derivative of the softmax's denominator.
        pulled = grad @ value.repeat_interleave(repeats, 0).mT - (grad * output).sum(-1, keepdim=True)
        slopes = weights * pulled * factor
        grads[0].append(slopes @ key.repeat_interleave(repeats, 0))
        for found, whole in zip(grads[1:], (slopes.mT @ query, weights.mT @ grad), strict=True):
            # Query heads that share a key head add up to its gradient.
            found.append(whole.unflatten(0, (-1, repeats)).sum(1))
    return _pack(grads[0], q), _pack(grads[1], k), _pack(grads[2], v)
