"""All-gather of keys and values (as for Llama 3, https://arxiv.org/abs/2407.21783): queries stay on their rank.

The two chunks of a sequence on a rank become two sequences of queries, each with the keys up to its own last token.
This is the bottom-right alignment that attention has for queries after a cache, so ordinary attention can serve with
all its features. With few key heads the gather is cheap, but all keys and values are in memory at once. Equally long
sequences without a window use dense kernels instead (:func:`attend_dense`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.nn import InnerAttention
from megalight.ops.attention_block import ATTENTION_BLOCK, block_attention, block_attention_backward
from megalight.ops.attention_merge import merge
from megalight.ops.autograd import once_differentiable
from megalight.parallel.collectives import all_gather, start_all_gather, start_reduce_scatter
from megalight.parallel.context.spec import ContextGroups, ContextSpec
from megalight.types import ContextShare, PackedSequences, to_device


@dataclass(frozen=True, eq=False)
class GatherBlocks:
    """The blocks that a rank computes.

    A chunk of queries sees all keys before the chunk, and its own keys up to each query. These two blocks are
    merged by their log-sum-exps (:mod:`megalight.ops.attention_merge`), so kernels without a bottom-right mask can
    serve. The block of a chunk with its own keys needs no other share and runs during the gather. Gathered keys are
    freed after the forward. The backward gathers them again during one such block, and reduce-scatters their
    gradients during the other.

    Attributes:
        batch: number of sequences.
        chunks: for each chunk of queries, its slice of a sequence and the number of keys (from the first on) that all
            its queries see.
        causal: whether each chunk also sees its own keys under a causal mask.
        rows: ``[batch * n]``: indices of these keys among the gathered ones, in natural order.
    """

    batch: int
    chunks: tuple[tuple[slice, int], ...]
    causal: bool
    rows: Tensor


def layout_of(sequences: PackedSequences, share: ContextShare, causal: bool) -> GatherBlocks | None:
    """Return the layout of a share, or None if sequences (without causal mask: their real tokens) differ in length."""
    real = share.real_lengths[0]
    if sequences.uniform is None or (not causal and set(share.real_lengths) != {real}):
        return None
    # Chunk `late` is the last that this rank holds, so its keys include those of all chunks before.
    batch, length = sequences.uniform
    chunk, late = length // 2, 2 * share.size - 1 - share.rank
    chunks: tuple[tuple[slice, int], ...] = ((slice(0, length), real),)
    if causal:
        # Chunk c of the whole sequence has c chunks before it, which all its queries see. This rank holds chunks `rank`
        # and `late`.
        chunks = (slice(0, chunk), share.rank * chunk), (slice(chunk, length), late * chunk)
    # As many keys as the later chunk sees; the earlier one takes the first of them.
    keys = PackedSequences.of_uniform(batch, chunks[-1][1], sequences.device)
    sequence = keys.expand(torch.arange(batch, device=sequences.device))
    return GatherBlocks(batch, chunks, causal, share.rows_of(sequence, keys.positions))


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: GatherBlocks,
    group: ProcessGroup | None,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of this rank's share: ``q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, H, Dv]``."""
    call = _GatherConstants(layout, group, scale, backend, q.shape[-1])
    out: Tensor = _DenseGather.apply(q, torch.cat([k, v], -1), call)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _GatherConstants:
    """The constants of one call."""

    layout: GatherBlocks
    group: ProcessGroup | None
    scale: float | None
    backend: str
    head_dim: int

    def fold(self, x: Tensor) -> Tensor:
        """View ``[T, ...]`` as ``[B, S, ...]``."""
        return x.view(self.layout.batch, -1, *x.shape[1:])

    def keys(self, gathered: Tensor) -> Tensor:
        """Return gathered keys and values as ``[B, n, Hkv, D + Dv]`` in natural order."""
        return self.fold(gathered.index_select(0, self.layout.rows))

    def gathered(self, keys: Tensor, like: Tensor) -> Tensor:
        """Inverse of :meth:`keys`: the rows of all shares, each shaped like ``like``. Rows that are not keys are 0."""
        size = 1 if self.group is None else self.group.size()
        return like.new_zeros((size * len(like), *like.shape[1:])).index_copy_(0, self.layout.rows, keys.flatten(0, 1))

    def block(self, query: Tensor, both: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp over some keys; ``both`` holds keys and values side by side."""
        options: dict[str, Any] = {"causal": causal, "scale": self.scale, "backend": self.backend}
        return block_attention(query, both[..., : self.head_dim], both[..., self.head_dim :], **options)

    def block_backward(
        self, grad: Tensor, query: Tensor, both: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Return gradients of the queries, and of keys and values side by side."""
        options: dict[str, Any] = {"causal": causal, "scale": self.scale, "backend": self.backend}
        key, value = both[..., : self.head_dim], both[..., self.head_dim :]
        grads = block_attention_backward(grad, query, key, value, out, lse, **options)
        return grads[0], torch.cat(grads[1:], -1)


class _DenseGather(torch.autograd.Function):
    """``q [T, H, D]``, and keys and values side by side ``[T, Hkv, D + Dv]``, to ``[T, H, Dv]``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, both: Tensor, call: _GatherConstants) -> Tensor:
        chunks, query, own = call.layout.chunks, call.fold(q), call.fold(both)
        # Posted first, so that it runs under the blocks below.
        flight = start_all_gather(both, call.group)
        # While the gather runs: each chunk with its own keys.
        found = [call.block(query[:, here], own[:, here], True) for here, _ in chunks if call.layout.causal]
        # `[B, n, Hkv, D + Dv]`, from all ranks, in the sequence's natural order.
        keys = call.keys(flight.wait())
        out = q.new_empty((*query.shape[:3], both.shape[-1] - call.head_dim))
        sums = []
        for place, (here, count) in enumerate(chunks):
            parts = found[place : place + 1]
            if count:
                parts.append(call.block(query[:, here], keys[:, :count], False))
            if len(parts) == 2:
                # Straight into its place in the output. The log-sum-exp goes on to the backward.
                parts = [merge(*parts[0], *parts[1], into=(out[:, here], torch.empty_like(parts[0][1])))]
            else:
                out[:, here] = parts[0][0]
            sums.append(parts[0][1])
        # Without the gathered keys: they would keep memory of all ranks' shares until the backward.
        ctx.save_for_backward(q, both, out, *sums)
        ctx.call = call
        return out.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        call: _GatherConstants = ctx.call
        q, both, out, *sums = ctx.saved_tensors
        query, own, grad = call.fold(q), call.fold(both), call.fold(grad)
        grad_q, grad_own = torch.zeros_like(query), torch.zeros_like(own)

        def add(place: int, keys: Tensor, grad_keys: Tensor, causal: bool) -> None:
            here = call.layout.chunks[place][0]
            # The merged output and log-sum-exp: gradients of the two blocks then add up to that of the whole.
            tensors = grad[:, here], query[:, here], keys, out[:, here], sums[place]
            part, part_keys = call.block_backward(*tensors, causal)
            grad_q[:, here] += part
            grad_keys += part_keys

        def add_own(place: int) -> None:
            here = call.layout.chunks[place][0]
            if call.layout.causal:
                add(place, own[:, here], grad_own[:, here], True)

        flight = start_all_gather(both, call.group)
        # While the gather runs: the own keys need no message.
        add_own(0)
        keys = call.keys(flight.wait())
        grad_keys = torch.zeros_like(keys)
        for place, (_, count) in enumerate(call.layout.chunks):
            if count:
                add(place, keys[:, :count], grad_keys[:, :count], False)
        # Each rank has terms for all keys; the owner of a key gets their sum. The last own block covers it.
        flight = start_reduce_scatter(call.gathered(grad_keys, both), call.group)
        if call.layout.causal:
            add_own(1)
        return grad_q.flatten(0, 1), grad_own.flatten(0, 1) + flight.wait(), None


def why_not(spec: ContextSpec) -> str | None:
    """Return why it cannot serve a layer, or None: a window, and chunks, need a causal mask."""
    if (spec.window or spec.chunk) and not spec.causal:
        limit = "window" if spec.window else "chunks"
        return f"has no {limit} without a causal mask, because keys after the queries cannot be aligned"
    return None


def attend(
    inner: InnerAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    groups: ContextGroups,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's share: ``q [T, H, D], k, v [T, Hkv, D], sink [H] -> [T, H, D]``."""
    share = sequences.context
    assert share is not None
    layout = share.once(("dense_gather", inner.causal), layout_of, sequences, share, inner.causal)
    # Two dense blocks overlap with the gather, which this way cannot: it is for what only full attention has.
    if layout is not None and _plain(inner):
        return attend_dense(q, k, v, layout, groups.all, scale=inner.scale, backend=inner.backend)
    chunks, keys, values = visible_keys(k, v, sequences, groups, causal=inner.causal, window=inner.window)
    out: Tensor = inner(q, keys, values, chunks, None, sink)
    return out


def chunks_of(
    sequences: PackedSequences, *, causal: bool = True, window: int | None = None
) -> tuple[PackedSequences, Tensor]:
    """Return the chunks of a share's queries with their keys, and the indices of these keys among the gathered ones."""
    share = sequences.context
    assert share is not None
    return share.once(("gather", causal, window), _chunks, sequences, share, causal, window)


def visible_keys(
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    groups: ContextGroups,
    *,
    causal: bool = True,
    window: int | None = None,
) -> tuple[PackedSequences, Tensor, Tensor]:
    """Return the chunks of a share's queries, and keys ``[Tk, Hkv, D]`` and values that they see, of all shares.

    Args:
        k: ``[T, Hkv, D]``, of this share.
        v: ``[T, Hkv, Dv]``, of this share.
        sequences: this share.
        groups: the process groups.
        causal, window: see :class:`~megalight.nn.InnerAttention`.
    """
    chunks, rows = chunks_of(sequences, causal=causal, window=window)
    # `[cp T, Hkv (D + Dv)]`: keys and values in one collective. Its backward is a reduce-scatter.
    everything = all_gather(torch.cat([k.flatten(1), v.flatten(1)], 1), groups.all)
    # A row is selected at most twice. So its gradient is a sum of two terms, which does not depend on their order.
    taken = torch.split(everything.index_select(0, rows), [k[0].numel(), v[0].numel()], 1)
    keys, values = (part.view(len(rows), *x.shape[1:]) for part, x in zip(taken, (k, v), strict=True))
    return chunks, keys, values


def _plain(inner: InnerAttention) -> bool:
    """Return whether block attention has all the features that the layer needs."""
    dropped = inner.dropout > 0 and inner.training
    limited = inner.window is not None or inner.chunk is not None
    added = inner.softmax != "vanilla" or limited or inner.softcap is not None
    return not added and not dropped and _has_blocks(inner.backend)


@lru_cache
def _has_blocks(backend: str) -> bool:
    """Return whether a backend of attention serves blocks too."""
    return backend == "auto" or backend in ATTENTION_BLOCK.names


def _chunks(
    sequences: PackedSequences, share: ContextShare, causal: bool, window: int | None
) -> tuple[PackedSequences, Tensor]:
    """Return the chunks of queries with their keys, and the indices of these keys among the gathered ones."""
    device = sequences.device
    index = torch.arange(len(sequences.lengths), device=device)
    if not causal:
        keys = PackedSequences.of_lengths(share.real_lengths, device)
        # Without a mask, queries of both chunks see the same keys, so the share stays one sequence of queries.
        return replace(sequences, context=None, keys=keys), share.rows_of(keys.expand(index), keys.positions)
    places = share.rank, 2 * share.size - 1 - share.rank
    chunks = [length // 2 for length in sequences.lengths]
    queries = PackedSequences.of_lengths([chunk for chunk in chunks for _ in places], device)
    # Keys before the window of the chunk's first query are seen by none of its queries: they are not selected.
    skipped = [max(0, place * chunk - window) if window is not None else 0 for chunk in chunks for place in places]
    seen = [(place + 1) * chunk for chunk in chunks for place in places]
    keys = PackedSequences.of_lengths([stop - start for start, stop in zip(skipped, seen, strict=True)], device)
    starts = keys.expand(to_device(skipped, torch.int64, device))
    return replace(queries, keys=keys), share.rows_of(keys.expand(index.repeat_interleave(2)), starts + keys.positions)
