"""Ring attention (https://arxiv.org/abs/2310.01889): queries stay, keys and values move to the next rank in each step.

While a rank computes the block of its queries and the current keys, it receives the next keys. Outputs of blocks are
merged by their log-sum-exps. In the backward, keys and values go around the ring again, and the sums of their gradients
follow them; a last step brings these sums home. Only a rank's own share is kept between steps. Shares have the zigzag
order, so that all ranks have equal work under a causal mask (:mod:`megalight.parallel.context.ring`). Under a
window, or chunks of attention, only blocks that a query can see are computed. Keys still go around the whole ring: in
the zigzag order, the chunk before a rank's second one is on the rank that its keys reach last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import LayoutError
from megalight.nn import InnerAttention
from megalight.ops.attention_block import EXAMPLE, REGISTRIES, block_attention, block_attention_backward
from megalight.ops.attention_merge import merge
from megalight.ops.autograd import once_differentiable
from megalight.ops.common import wide
from megalight.parallel.context.spec import ContextGroups, ContextSpec
from megalight.types import ContextShare, PackedSequences


class Band(NamedTuple):
    """Queries and keys of two chunks that see each other.

    A sequence has ``2 n`` chunks of ``length`` tokens, of which a rank holds two. Below, queries are those of chunk
    ``q``, and keys are those of chunk ``k <= q``. Their distance is ``q - k`` chunks.

    Attributes:
        queries: range of queries, from the beginning of their chunk.
        keys: range of keys, from the beginning of theirs. There are as many keys as queries if a mask is needed.
        causal: whether query ``i`` sees no key after key ``i``.
        window: query ``i`` sees no key before key ``i - window``. None: all.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    window: int | None


def bands(q: int, k: int, length: int, window: int | None, chunk: int | None) -> Iterator[Band]:
    """Yield what queries of chunk ``q`` see of the keys of chunk ``k``; no query is in two bands.

    Args:
        q: number of the queries' chunk.
        k: number of the keys' chunk.
        length: tokens of each.
        window: number of earlier tokens that a query sees besides itself.
        chunk: a query sees only keys of its own ``chunk`` tokens, counted from the beginning of the sequence.
    """
    if k > q or not length:
        return
    if window is not None:
        yield from _window(q - k, length, window)
    else:
        assert chunk is not None
        yield from _chunk(q * length, k * length, length, chunk)


def _window(distance: int, length: int, window: int) -> Iterator[Band]:
    if distance == 0:
        yield Band((0, length), (0, length), True, window)
        return
    # `distance - 1` chunks lie between keys and queries. With each further query, one key less is seen.
    seen = min(length, window - (distance - 1) * length)
    if seen > 0:
        # As many queries as keys: query i sees key j if j >= i - left.
        left = max(0, window - distance * length)
        yield Band((0, seen), (length - seen, length), False, None if left >= seen - 1 else left)


def _chunk(first: int, key: int, length: int, chunk: int) -> Iterator[Band]:
    begin = first // chunk * chunk
    if first == key:
        for start in range(begin, first + length, chunk):
            rows = max(start, first) - first, min(start + chunk, first + length) - first
            yield Band(rows, rows, True, None)
    elif begin < key + length:
        # Only the chunk that the first query is in begins before the keys end.
        yield Band((0, min(begin + chunk - first, length)), (max(begin - key, 0), length), False, None)


@dataclass(frozen=True, eq=False)
class TokenSelection:
    """A selection of the tokens of a share. Equal selections are the same object, so they can be compared by identity.

    Attributes:
        start: the first token of each sequence, if all sequences are equally long.
        count: number of tokens from ``start`` on.
        index: ``[n]``: the index of every token, if sequences differ in length.
    """

    start: int
    count: int
    index: Tensor | None = None

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Select these tokens of ``x`` along ``dim``: a view, or a copy if there is an index."""
        return x.narrow(dim, self.start, self.count) if self.index is None else x.index_select(dim, self.index)

    def put_(self, x: Tensor, taken: Tensor, dim: int = 1) -> None:
        """Write tokens from :meth:`take` back after they were changed. Views are already written."""
        if self.index is not None:
            # An index made copies in `take`, so what was changed there must be written back; a
            # view changed its origin.
            x.index_copy_(dim, self.index, taken)

    def add_(self, x: Tensor, part: Tensor) -> None:
        """Add ``part`` to these tokens of ``x``, along dim 1."""
        if self.index is None:
            x.narrow(1, self.start, self.count).add_(part)
        else:
            # Accumulates in the dtype of the total: parts come in the dtype of the inputs.
            x.index_add_(1, self.index, part.to(x.dtype))


@dataclass(frozen=True, eq=False)
class Block:
    """The queries of this rank that see keys of one share, and these keys.

    Attributes:
        queries: the queries, of this rank's share.
        keys: the keys, of the other share.
        sequences: how packed tokens divide, for :func:`megalight.ops.attention_block.block_attention`. None: dense.
        causal: whether query ``i`` sees only keys up to ``i``; there are then as many keys as queries.
        all_queries: whether all queries of the share take part.
        window: query ``i`` sees no key before key ``i - window``; there are then as many keys as queries. None: all.
    """

    queries: TokenSelection
    keys: TokenSelection
    sequences: PackedSequences | None
    causal: bool
    all_queries: bool
    window: int | None = None


@dataclass(frozen=True, eq=False)
class RingBlocks:
    """The blocks of a rank in the order of the ring's steps: keys of shares ``r, r - 1, ...`` arrive one after another.

    Attributes:
        batch: batch size to view the share's tokens with: the number of sequences if they are equally long, else 1.
        steps: the blocks of each share: none if no query sees a key of it, several if masks differ. The first block
            of the first step is the only one that may have all queries, each of which sees itself.
    """

    batch: int
    steps: tuple[tuple[Block, ...], ...]


def blocks_of(
    sequences: PackedSequences, causal: bool, window: int | None = None, chunk: int | None = None
) -> RingBlocks:
    """Return the blocks of this rank's share, computed once for all layers.

    Args:
        sequences: this rank's share.
        causal: whether a query sees no later key.
        window: number of earlier tokens that a query sees besides itself; for causal masks. None: all.
        chunk: a query sees only keys of its own chunk of so many tokens; for causal masks. None: all.
    """
    share = sequences.context
    assert share is not None
    # Cached on the share, whose sequences all layers have; the pattern depends on the mask alone.
    if window is None and chunk is None:
        return share.once(("ring", causal), _blocks, sequences, share, causal)
    return share.once(("ring", window, chunk), _limited, sequences, share, window, chunk)


def _blocks(sequences: PackedSequences, share: ContextShare, causal: bool) -> RingBlocks:
    # Equal lengths allow dense kernels, which are faster, and views instead of copies by index.
    equal = sequences.uniform is not None and (causal or len(set(share.real_lengths)) == 1)
    make = _dense if equal else _packed
    steps = []
    for step in range(share.size):
        # Keys travel to the next rank, so after s steps this rank has those of the rank s before it.
        source = (share.rank - step) % share.size
        stretches = [
            _stretch(length, real, share.rank, source, share.size, causal)
            for length, real in zip(sequences.lengths, share.real_lengths, strict=True)
        ]
        block = make(sequences, stretches, causal and step == 0)
        steps.append(() if block is None else (block,))
    return RingBlocks(len(sequences.lengths) if equal else 1, tuple(steps))


def _stretch(length: int, real: int, rank: int, source: int, size: int, causal: bool) -> tuple[int, int]:
    """For a sequence with ``length`` tokens per share, return the first query that sees keys, and how many keys."""
    chunk = length // 2
    if not causal:
        # Real tokens of the two chunks; padding at the end of the sequence is no key.
        return 0, sum(min(chunk, max(0, real - place * chunk)) for place in (source, 2 * size - 1 - source))
    if source < rank:
        return 0, chunk
    return (0 if source == rank else chunk), length


def _limited(sequences: PackedSequences, share: ContextShare, window: int | None, chunk: int | None) -> RingBlocks:
    """Return the blocks under a window or chunks: always packed, as no dense kernel has their masks."""
    offsets = (0, *accumulate(sequences.lengths))
    mine = share.rank, 2 * share.size - 1 - share.rank
    steps = []
    for step in range(share.size):
        source = (share.rank - step) % share.size
        theirs = source, 2 * share.size - 1 - source
        # One kernel has one mask. And no key twice in a block, or sums of gradients would depend on their order; so
        # pairs of different chunks have blocks of their own. The first pairs are those of chunks with themselves.
        groups: dict[tuple[int, bool, int | None], list[tuple[tuple[int, int], tuple[int, int]]]] = {}
        for (place, length), (i, q), (j, k) in product(
            enumerate(sequences.lengths), enumerate(mine), enumerate(theirs)
        ):
            half = length // 2
            for band in bands(q, k, half, window, chunk):
                pair = 0 if q == k else 1 + 2 * i + j
                rows, keys = (
                    (offsets[place] + side * half + start, offsets[place] + side * half + stop)
                    for side, (start, stop) in ((i, band.queries), (j, band.keys))
                )
                groups.setdefault((pair, band.causal, band.window), []).append((rows, keys))
        blocks = []
        for (_, causal, width), pairs in sorted(groups.items(), key=lambda group: group[0][0]):
            rows_of, keys_of = [rows for rows, _ in pairs], [keys for _, keys in pairs]
            blocks.append(_block(sequences, rows_of, keys_of, causal, width))
        steps.append(tuple(blocks))
    return RingBlocks(1, tuple(steps))


# The same object for the same numbers, as `_Taken` compares by identity.
@lru_cache(maxsize=256)
def _slice(start: int, count: int) -> TokenSelection:
    return TokenSelection(start, count)


def _dense(sequences: PackedSequences, stretches: Sequence[tuple[int, int]], causal: bool) -> Block | None:
    length, (start, keys) = sequences.lengths[0], stretches[0]
    return Block(_slice(start, length - start), _slice(0, keys), None, causal, start == 0) if keys else None


def _packed(sequences: PackedSequences, stretches: Sequence[tuple[int, int]], causal: bool) -> Block | None:
    # Queries and keys of a sequence take part only together, or kernels would pair wrong neighbors.
    offsets = (0, *accumulate(sequences.lengths))
    seen = [place for place, (_, keys) in enumerate(stretches) if keys]
    if not seen:
        return None
    queries = [(offsets[place] + stretches[place][0], offsets[place + 1]) for place in seen]
    keys = [(offsets[place], offsets[place] + stretches[place][1]) for place in seen]
    return _block(sequences, queries, keys, causal)


def _block(
    sequences: PackedSequences,
    queries: Sequence[tuple[int, int]],
    keys: Sequence[tuple[int, int]],
    causal: bool,
    window: int | None = None,
) -> Block:
    """Return the packed block in which each range of queries sees the range of keys beside it."""
    total, device = sum(sequences.lengths), sequences.device
    packed = PackedSequences.of_lengths([stop - start for start, stop in queries], device)
    # The same lengths on both sides are plain self-attention, for which more kernels serve.
    if queries != keys:
        packed = replace(packed, keys=PackedSequences.of_lengths([stop - start for start, stop in keys], device))
    rows = _index(tuple(queries), total, device)
    return Block(rows, _index(tuple(keys), total, device), packed, causal, rows.count == total, window)


@lru_cache(maxsize=16)
def _index(stretches: tuple[tuple[int, int], ...], total: int, device: torch.device) -> TokenSelection:
    """Return the selection of these ranges of a packed tensor with ``total`` tokens."""
    count = sum(stop - start for start, stop in stretches)
    if count == total:
        return _slice(0, total)
    index = torch.cat([torch.arange(start, stop) for start, stop in stretches])
    index = index.pin_memory() if device.type == "cuda" else index  # so that the host does not wait for the copy
    return TokenSelection(0, count, index.to(device, non_blocking=True))


def why_not(spec: ContextSpec) -> str | None:
    """Return why it cannot serve a layer, or None: block attention has no soft cap or dropout."""
    if spec.window or spec.chunk:
        limit = "window" if spec.window else "chunks"
        if not spec.causal:
            return f"has no {limit} without a causal mask, because a query would see keys on both sides"
        if spec.window and spec.chunk:
            return "has no window within chunks"
        if spec.auto:
            return f"has no work to hide its messages behind if there are {limit}: auto takes all_gather"
    if spec.softcap:
        return "has no soft cap on scores"
    if spec.dropout:
        return "has no dropout of attention weights"
    # Before any call: a misspelled backend would else be found in the first step.
    for registry in REGISTRIES:
        if spec.backend not in ("auto", *registry.names):
            known = ", ".join(registry.names)
            return f"has no attention backend {spec.backend!r}: {registry.op} has {known}"
    if (spec.window or spec.chunk) and spec.backend != "auto":
        against = _reasons_against_limits(spec.window)
        if spec.backend in against:
            return (
                f"has no attention backend {spec.backend!r} for {limit}, whose blocks are packed: it "
                f"{against[spec.backend]}; {', '.join(name for name in REGISTRIES[0].names if name not in against)} "
                "can serve them, or let the backend be 'auto'"
            )
    return None


def _reasons_against_limits(window: bool) -> dict[str, str]:
    """Return the backends that serve blocks without a limit, but not those of a window or of chunks; and why."""
    limited = EXAMPLE._replace(dense=False, window=window)
    reasons: dict[str, str] = {}
    for registry in REGISTRIES:
        plain = {backend.name: why for backend, why in registry.table(EXAMPLE)}
        # The device is unknown before the first step, so what speaks against the example as well does not count.
        reasons |= {b.name: why for b, why in registry.table(limited) if why is not None and why != plain[b.name]}
    return reasons


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
    return ring_attention(
        q,
        k,
        v,
        sequences,
        groups.all,
        causal=inner.causal,
        scale=inner.scale,
        sink=inner.sinks(q, sink),
        window=inner.window,
        chunk=inner.chunk,
        backend=inner.backend,
    )


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    group: ProcessGroup | None,
    *,
    causal: bool,
    scale: float | None = None,
    sink: Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """``softmax(q k^T * scale) v`` within each sequence, whose tokens are divided over the ranks of a group.

    Args:
        q: ``[T, H, D]``: this rank's share of the tokens.
        k: ``[T, Hkv, D]``; ``H`` is a multiple of ``Hkv``.
        v: ``[T, Hkv, Dv]``.
        sequences: this rank's share, from :meth:`PackedSequences.zigzag`.
        group: the ranks, in the order of their shares. None: one rank.
        causal: whether a query sees no later key.
        scale: factor on scores; ``1 / sqrt(D)`` by default.
        sink: ``[H]``: the denominator of the softmax has one more term, ``e^sink``.
        window: number of earlier tokens that a query sees besides itself; for causal attention. None: all.
        chunk: a query sees only keys of its own chunk of so many tokens; for causal attention. None: all.
        backend: backend of :func:`megalight.ops.attention_block.block_attention`.

    Returns:
        ``[T, H, Dv]``. Outputs of padding are undefined.

    Raises:
        LayoutError: the sequences are not cut, or are cut for another number of ranks or another rank.
        BackendError: no backend of block attention can serve, or the named one cannot.
    """
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    share = sequences.context
    if share is None or (share.size, share.rank) != (size, rank):
        cut = "not cut" if share is None else f"share {share.rank} of {share.size}"
        raise LayoutError(
            f"the sequences are {cut}, but this is rank {rank} of a ring of {size}; "
            "cut them with PackedSequences.zigzag(rank, size)."
        )
    ring = _Ring(group, blocks_of(sequences, causal, window, chunk), scale, backend)
    # Keys and values side by side: one message per step.
    out: Tensor = _RingAttention.apply(q, torch.cat((k, v), -1), sink, ring)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _Ring:
    """The constants of one call."""

    group: ProcessGroup | None
    blocks: RingBlocks
    scale: float | None
    backend: str

    def fold(self, x: Tensor) -> Tensor:
        """View ``[T, heads, D]`` as ``[B, S, heads, D]``."""
        return x.view(self.blocks.batch, -1, *x.shape[1:])

    def columns(self, kv: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """View keys as ``[B, S, Hkv, D]`` and values as ``[B, S, Hkv, Dv]``."""
        return self.fold(kv)[..., :head_dim], self.fold(kv)[..., head_dim:]

    def block(self, block: Block, kv: Tensor, head_dim: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Return the keys and values of a block, and the options for its op."""
        keys, values = (block.keys.take(part) for part in self.columns(kv, head_dim))
        mask = {"sequences": block.sequences, "causal": block.causal, "window": block.window}
        return (keys, values), {**mask, "scale": self.scale, "backend": self.backend}

    def send(self, x: Tensor) -> _Flight:
        """Start to send ``x`` to the next rank, and to receive a tensor of the same shape from the previous rank."""
        assert self.group is not None
        rank, size = self.group.rank(), self.group.size()
        arriving = torch.empty_like(x)
        leave = dist.P2POp(dist.isend, x, group=self.group, group_peer=(rank + 1) % size)
        arrive = dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=(rank - 1) % size)
        # Posted as one batch: with separate calls, all ranks of the ring could block in their sends.
        return _Flight(dist.batch_isend_irecv([leave, arrive]), x, arriving)


@dataclass
class _Flight:
    """A send and a receive in flight. The tensor that is sent is kept alive until :meth:`wait`."""

    works: list[dist.Work]
    leaving: Tensor | None
    arriving: Tensor

    def wait(self) -> Tensor:
        """Return the received tensor. On a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        self.leaving = None
        return self.arriving


class _Taken:
    """Caches a selection of tokens of tensors ``[B, S, ...]`` or ``[B, H, S]`` while steps need the same selection."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self.rows: TokenSelection | None = None
        self.found: tuple[Tensor, ...] = ()

    def of(self, rows: TokenSelection) -> tuple[Tensor, ...]:
        """Return the selected tokens, contiguous, so that kernels do not copy them in every step."""
        if rows is not self.rows:
            self.found = ()  # free the old selection first
            self.found = tuple(rows.take(t, 1 if t.ndim == 4 else 2).contiguous() for t in self.tensors)
            self.rows = rows
        return self.found


class _Output:
    """The output ``[B, S, H, Dv]`` and log-sum-exp ``[B, H, S]``, merged over the blocks so far."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.found: tuple[Tensor, Tensor] | None = None

    def add(self, block: Block, part: tuple[Tensor, Tensor]) -> None:
        """Merge the output and log-sum-exp of a block."""
        # The first block over all queries is the result so far, and needs no merge.
        if block.all_queries and self.found is None:
            self.found = part
            return
        out, lse = self.found or self._nothing(part[1])
        if block.all_queries:  # the first merge makes tensors of a wider dtype; later ones reuse them
            self.found = merge(out, lse, *part, into=(out, lse) if out.dtype == wide(self.dtype) else None)
            return
        # Wide from the first merge on: a half-precision output would be rounded once per step.
        self.found = out, lse = out.to(wide(self.dtype)), lse
        mine = block.queries.take(out), block.queries.take(lse, 2)
        merge(*mine, *part, into=mine)
        block.queries.put_(out, mine[0])
        block.queries.put_(lse, mine[1], 2)

    def _nothing(self, like: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, heads, _ = self.shape
        # The log-sum-exp of nothing: a merge gives all weight to the other part.
        return like.new_zeros(self.shape), like.new_full((batch, heads, length), -torch.inf)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the output in the dtype of the inputs, and the log-sum-exp."""
        assert self.found is not None  # every query sees a key in some step
        return self.found[0].to(self.dtype).contiguous(), self.found[1].contiguous()


class _RingAttention(torch.autograd.Function):
    """``q [T, H, D], kv [T, Hkv, D + Dv], sink [H] -> [T, H, Dv]``.

    Keys and values are one tensor, so one message sends both. The sink is merged last, on each rank for its queries, as
    a block with one key whose value is 0; see :mod:`megalight.ops.attention.variants`.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, sink: Tensor | None, ring: _Ring) -> Tensor:
        steps, last, here = ring.blocks.steps, len(ring.blocks.steps) - 1, kv
        query = ring.fold(q)
        queries = _Taken(query)
        output = _Output((*query.shape[:3], kv.shape[-1] - q.shape[-1]), q.dtype)
        for step, blocks in enumerate(steps):
            # Before the blocks, so that the next keys arrive while they are computed. `here` is only read until then.
            flight = ring.send(here) if step < last else None
            for block in blocks:
                (mine,) = queries.of(block.queries)
                (keys, values), options = ring.block(block, here, q.shape[-1])
                output.add(block, block_attention(mine, keys, values, **options))
            if flight is not None:
                here = flight.wait()
        out, lse = output.result()
        if sink is not None:
            total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
            out = (out * (lse - total).exp().mT[..., None]).to(q.dtype)
            lse = total  # with it and the smaller output, the gradients of all blocks are right
        ctx.save_for_backward(q, kv, sink, out, lse)
        ctx.ring = ring
        return out.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sink, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        steps, last, here = ring.blocks.steps, len(ring.blocks.steps) - 1, kv
        # Everything that the backward selects by queries, so that one selection serves all four.
        queries = _Taken(ring.fold(grad), ring.fold(q), out, lse)
        grad_q: Tensor | None = None
        # Float32 on its way around the ring: up to cp terms are added to it, on as many ranks.
        grad_kv = torch.zeros_like(kv, dtype=wide(kv.dtype))
        for step, blocks in enumerate(steps):
            # Keys first, then sums, on all ranks alike: messages of one pair of ranks arrive in order.
            flight = ring.send(here) if step < last else None
            # The sums of gradients follow the keys that they belong to, one step behind.
            sums = ring.send(grad_kv) if step else None
            found: list[tuple[Block, list[Tensor]]] = []
            for block in blocks:
                grad_out, query, output, logs = queries.of(block.queries)
                (keys, values), options = ring.block(block, here, q.shape[-1])
                part, *parts = block_attention_backward(grad_out, query, keys, values, output, logs, **options)
                grad_q = _add(grad_q, ring.fold(q), block, part)
                found.append((block, parts))
            if flight is not None:
                here = flight.wait()
            if sums is not None:
                grad_kv = sums.wait()
            # After the wait for the sums: what arrives are the terms of the ranks before. This rank adds its own.
            for block, parts in found:
                # Into a view of `grad_kv`, whose columns are those of keys and values.
                for columns, part in zip(ring.columns(grad_kv, q.shape[-1]), parts, strict=True):
                    block.keys.add_(columns, part)
        # The sums have gone around n - 1 steps, and belong to the next rank's keys.
        grad_kv = grad_kv.to(kv.dtype)
        if last:  # the sums are complete; no computation hides this last message, so send the narrower dtype
            grad_kv = ring.send(grad_kv).wait()
        assert grad_q is not None
        grad_sink = None
        if sink is not None and ctx.needs_input_grad[2]:
            pulled = (ring.fold(grad).to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [B, S, H]
            weight = (sink.to(lse.dtype)[:, None] - lse).exp()  # [B, H, S], that of the sink in the softmax
            grad_sink = -(weight.mT * pulled).sum((0, 1)).to(sink.dtype)
        return grad_q.flatten(0, 1).to(q.dtype), grad_kv, grad_sink, None


def _add(total: Tensor | None, like: Tensor, block: Block, part: Tensor) -> Tensor:
    """Add a block's gradient of the queries to the total."""
    if total is None and block.all_queries:
        # Wide as the total: later blocks add to it in place.
        return part.to(wide(like.dtype))
    total = torch.zeros_like(like, dtype=wide(like.dtype)) if total is None else total
    block.queries.add_(total, part)
    return total
