"""Block attention by torch's kernels: dense blocks by cuDNN, dense or packed ones by the flash kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import mask, wide
from megalight.types import PackedSequences


def packed(q: Tensor, k: Tensor) -> PackedSequences:
    """Return the sequences of dense queries ``[B, S, H, D]`` and keys ``[B, Sk, Hkv, D]``."""
    queries = PackedSequences.of_uniform(q.shape[0], q.shape[1], q.device)
    return queries if q.shape[1] == k.shape[1] else replace(queries, keys=packed(k, k))


aten = torch.ops.aten


def cudnn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences | None,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a block; tensors ``[B, S, H, D]`` are viewed as ``[B, H, S, D]``.

    We call the operators behind ``scaled_dot_product_attention`` directly, because they return and take the
    log-sum- exp. cuDNN accepts any strides, so views into larger tensors need no copy. torch caches cuDNN's kernels
    by the strides of queries, keys and values only. So the output, its gradient and the log-sum-exp must always
    have one layout: we make them contiguous. They already are, unless a caller cuts a batch along its sequences.
    """
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    # `True` asks for the log-sum-exp, which the merge and the backward need; 0.0 is the dropout.
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse.squeeze(-1)


def cudnn_backward(
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


def _packing(q: Tensor, k: Tensor, sequences: PackedSequences | None) -> tuple[Any, ...]:
    """Return the offsets of queries and keys, and the longest length of both."""
    if sequences is None:
        return None, None, q.shape[1], k.shape[1]
    keys = sequences.keys or sequences
    # If the longest query length were 1, the kernel would fold heads together and reorder the log-sum-exp.
    return sequences.cu_seqlens, keys.cu_seqlens, max(2, sequences.max_length), keys.max_length


def _options(causal: bool, scale: float | None, window: int | None) -> dict[str, Any]:
    """Return the options of the kernel. With a window, that and not the causal flag hides later keys."""
    if window is None:
        return {"scale": scale}
    return {"scale": scale, "window_size_left": window, "window_size_right": 0 if causal else -1}


def _padded(x: Tensor, head_dim: int) -> Tensor:
    """Widen heads to ``head_dim`` by features of 0: the kernel has one size of heads."""
    missing = head_dim - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences | None,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of all sequences in one kernel."""
    packing, plain, options = _packing(q, k, sequences), causal and window is None, _options(causal, scale, window)
    value_dim, v = v.shape[-1], _padded(v, q.shape[-1])
    if sequences is None:
        out, lse, *_ = aten._flash_attention_forward(q, k, v, *packing, 0.0, plain, False, **options)
        return out[..., :value_dim], lse
    # Packed tensors are `[T, H, D]` for the kernel; the batch dim of 1 is ours.
    out, lse, *_ = aten._flash_attention_forward(q[0], k[0], v[0], *packing, 0.0, plain, False, **options)
    return out[None, ..., :value_dim], lse[None]


def varlen_backward(
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
    """Gradients of a block."""
    packing, lse, no_dropout = _packing(q, k, sequences), lse.contiguous(), lse.new_empty(0)
    plain, options = causal and window is None, _options(causal, scale, window)
    value_dim = v.shape[-1]
    # Widened values: features of 0 add nothing to outputs or gradients.
    grad_out, v, out = (_padded(x, q.shape[-1]) for x in (grad_out, v, out))
    # As in the other backends, `out` and `lse` are merged over all blocks.
    tensors = (grad_out, q, k, v, out, lse)
    if sequences is None:
        grads = aten._flash_attention_backward(*tensors, *packing, 0.0, plain, no_dropout, no_dropout, **options)
        return grads[0], grads[1], grads[2][..., :value_dim]
    rows = (t[0] for t in tensors)
    grads = aten._flash_attention_backward(*rows, *packing, 0.0, plain, no_dropout, no_dropout, **options)
    return grads[0][None], grads[1][None], grads[2][None, ..., :value_dim]


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


def reference_forward(
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


def reference_backward(
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
