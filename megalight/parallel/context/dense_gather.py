"""All-gather of keys and values for equally long sequences: dense kernels, and the gather hidden behind some of them.

A chunk of queries sees all keys before it, and of its own those up to each query. These two blocks are merged by their
log-sum-exps (:mod:`megalight.ops.attention_merge`), so that kernels without a bottom-right mask serve. The block of a
chunk with itself needs no other share, and runs while the gather is under way. The gathered keys are let go; the
backward pass gathers them again, behind one such block, and sums their gradients behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.ops.attention_block import block_attention, block_attention_backward
from megalight.ops.attention_merge import merge
from megalight.ops.common import once_differentiable
from megalight.parallel.collectives import start_all_gather, start_reduce_scatter
from megalight.types import ContextShare, PackedSequences


@dataclass(frozen=True, eq=False)
class Layout:
    """What a rank computes.

    Attributes:
        batch: sequences.
        chunks: of each sequence's queries, which, and how many keys from the first on they see entirely.
        causal: each chunk sees a triangle of its own keys, too.
        rows: ``[batch * n]``, where the keys that some chunk sees entirely lie among the gathered ones.
    """

    batch: int
    chunks: tuple[tuple[slice, int], ...]
    causal: bool
    rows: Tensor


def layout_of(sequences: PackedSequences, share: ContextShare, causal: bool) -> Layout | None:
    """The layout for a share; None where sequences, or under no causal mask their real tokens, differ in length."""
    real = share.real_lengths[0]
    if sequences.uniform is None or (not causal and set(share.real_lengths) != {real}):
        return None
    batch, length = sequences.uniform
    chunk, late = length // 2, 2 * share.size - 1 - share.rank
    chunks: tuple[tuple[slice, int], ...] = ((slice(0, length), real),)
    if causal:
        chunks = (slice(0, chunk), share.rank * chunk), (slice(chunk, length), late * chunk)
    keys = PackedSequences.of_uniform(batch, chunks[-1][1], sequences.device)
    sequence = keys.expand(torch.arange(batch, device=sequences.device))
    return Layout(batch, chunks, causal, share.rows_of(sequence, keys.positions))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    group: ProcessGroup | None,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """``q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, H, Dv]``: this rank's share."""
    call = _Call(layout, group, scale, backend, q.shape[-1])
    out: Tensor = _DenseGather.apply(q, torch.cat([k, v], -1), call)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _Call:
    """A layout, and how to compute."""

    layout: Layout
    group: ProcessGroup | None
    scale: float | None
    backend: str
    head_dim: int

    def fold(self, x: Tensor) -> Tensor:
        """``[T, ...]`` as ``[B, S, ...]``: a view."""
        return x.view(self.layout.batch, -1, *x.shape[1:])

    def keys(self, gathered: Tensor) -> Tensor:
        """``[B, n, Hkv, D + Dv]`` in natural order."""
        return self.fold(gathered.index_select(0, self.layout.rows))

    def gathered(self, keys: Tensor, like: Tensor) -> Tensor:
        """The way back: rows of all shares, of which ``like`` is one; those that are not among the keys are 0."""
        size = 1 if self.group is None else self.group.size()
        return like.new_zeros((size * len(like), *like.shape[1:])).index_copy_(0, self.layout.rows, keys.flatten(0, 1))

    def block(self, query: Tensor, both: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp over some keys, which stand beside their values."""
        options: dict[str, Any] = {"causal": causal, "scale": self.scale, "backend": self.backend}
        return block_attention(query, both[..., : self.head_dim], both[..., self.head_dim :], **options)

    def block_backward(
        self, grad: Tensor, query: Tensor, both: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the queries, and of keys beside values."""
        options: dict[str, Any] = {"causal": causal, "scale": self.scale, "backend": self.backend}
        key, value = both[..., : self.head_dim], both[..., self.head_dim :]
        grads = block_attention_backward(grad, query, key, value, out, lse, **options)
        return grads[0], torch.cat(grads[1:], -1)


class _DenseGather(torch.autograd.Function):
    """``q [T, H, D]`` and, side by side, keys and values ``[T, Hkv, D + Dv]`` to ``[T, H, Dv]``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, both: Tensor, call: _Call) -> Tensor:
        chunks, query, own = call.layout.chunks, call.fold(q), call.fold(both)
        flight = start_all_gather(both, call.group)
        found = [call.block(query[:, here], own[:, here], True) for here, _ in chunks if call.layout.causal]
        keys = call.keys(flight.wait())
        out = q.new_empty((*query.shape[:3], both.shape[-1] - call.head_dim))
        sums = []
        for place, (here, count) in enumerate(chunks):
            parts = found[place : place + 1]
            if count:
                parts.append(call.block(query[:, here], keys[:, :count], False))
            if len(parts) == 2:
                parts = [merge(*parts[0], *parts[1], into=(out[:, here], torch.empty_like(parts[0][1])))]
            else:
                out[:, here] = parts[0][0]
            sums.append(parts[0][1])
        ctx.save_for_backward(q, both, out, *sums)
        ctx.call = call
        return out.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        call: _Call = ctx.call
        q, both, out, *sums = ctx.saved_tensors
        query, own, grad = call.fold(q), call.fold(both), call.fold(grad)
        grad_q, grad_own = torch.zeros_like(query), torch.zeros_like(own)

        def add(place: int, keys: Tensor, grad_keys: Tensor, causal: bool) -> None:
            here = call.layout.chunks[place][0]
            tensors = grad[:, here], query[:, here], keys, out[:, here], sums[place]
            part, part_keys = call.block_backward(*tensors, causal)
            grad_q[:, here] += part
            grad_keys += part_keys

        def add_own(place: int) -> None:
            here = call.layout.chunks[place][0]
            if call.layout.causal:
                add(place, own[:, here], grad_own[:, here], True)

        flight = start_all_gather(both, call.group)
        add_own(0)
        keys = call.keys(flight.wait())
        grad_keys = torch.zeros_like(keys)
        for place, (_, count) in enumerate(call.layout.chunks):
            if count:
                add(place, keys[:, :count], grad_keys[:, :count], False)
        flight = start_reduce_scatter(call.gathered(grad_keys, both), call.group)
        if call.layout.causal:
            add_own(1)
        return grad_q.flatten(0, 1), grad_own.flatten(0, 1) + flight.wait(), None
