"""All-gather of keys and values (as for Llama 3, https://arxiv.org/abs/2407.21783): queries stay on their rank.

The two chunks of a sequence on a rank become two sequences of queries, each with the keys up to its own last token.
This is the bottom-right alignment that attention has for queries after a cache, so ordinary attention can serve with
all its features. With few key heads the gather is cheap, but all keys and values are in memory at once. Equally long
sequences without a window use :mod:`megalight.parallel.context.dense_gather` instead.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from megalight.nn import InnerAttention
from megalight.ops.attention_block import ATTENTION_BLOCK
from megalight.parallel.collectives import all_gather
from megalight.parallel.context import dense_gather
from megalight.parallel.context.spec import ContextGroups, ContextSpec
from megalight.types import ContextShare, PackedSequences, to_device


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
    layout = share.once(("dense_gather", inner.causal), dense_gather.layout_of, sequences, share, inner.causal)
    # Two dense blocks overlap with the gather, which this way cannot: it is for what only full attention has.
    if layout is not None and _plain(inner):
        return dense_gather.attend(q, k, v, layout, groups.all, scale=inner.scale, backend=inner.backend)
    chunks, keys, values = seen(k, v, sequences, groups, causal=inner.causal, window=inner.window)
    out: Tensor = inner(q, keys, values, chunks, None, sink)
    return out


def chunks_of(
    sequences: PackedSequences, *, causal: bool = True, window: int | None = None
) -> tuple[PackedSequences, Tensor]:
    """Return the chunks of a share's queries with their keys, and the indices of these keys among the gathered ones."""
    share = sequences.context
    assert share is not None
    return share.once(("gather", causal, window), _chunks, sequences, share, causal, window)


def seen(
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
