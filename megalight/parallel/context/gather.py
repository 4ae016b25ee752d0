"""All-gather of keys and values (as for Llama 3, arXiv 2407.21783): queries stay, keys and values of all shares come.

The two chunks of a sequence that a rank holds become two sequences of queries, each with its keys up to its own last
token, which is the alignment that attention has for queries after a cache. So it serves what ordinary attention
serves. With few key heads the gather is cheap, but all keys and values are held at once. Equally long sequences without
a window take the denser way of :mod:`megalight.parallel.context.dense_gather`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megalight.nn import InnerAttention
from megalight.parallel.collectives import all_gather
from megalight.parallel.context import dense_gather
from megalight.parallel.context.spec import ContextGroups, ContextSpec
from megalight.types import ContextShare, PackedSequences, to_device


def why_not(spec: ContextSpec) -> str | None:
    """A window needs a causal mask."""
    if spec.window and not spec.causal:
        return "has no window without a causal mask: keys after the queries cannot be aligned"
    return None


def attend(
    inner: InnerAttention, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, groups: ContextGroups
) -> Tensor:
    """This rank's share of attention: ``q [T, H, D], k, v [T, Hkv, D] -> [T, H, D]``."""
    share = sequences.context
    assert share is not None
    layout = share.once(("dense_gather", inner.causal), dense_gather.layout_of, sequences, share, inner.causal)
    if layout is not None and _plain(inner):
        return dense_gather.attend(q, k, v, layout, groups.all, scale=inner.scale, backend=inner.backend)
    chunks, rows = share.once(
        ("gather", inner.causal, inner.window), _chunks, sequences, share, inner.causal, inner.window
    )
    everything = all_gather(torch.cat([k.flatten(1), v.flatten(1)], 1), groups.all)
    # a row is taken at most twice, so the sum in its gradient has one order only
    taken = torch.split(everything.index_select(0, rows), [k[0].numel(), v[0].numel()], 1)
    keys, values = (part.view(len(rows), *x.shape[1:]) for part, x in zip(taken, (k, v), strict=True))
    out: Tensor = inner(q, keys, values, chunks)
    return out


def _plain(inner: InnerAttention) -> bool:
    """Whether blocks of attention do all that is asked."""
    dropped = inner.dropout > 0 and inner.training
    return inner.window is None and inner.softcap is None and not dropped and inner.backend in ("auto", "cudnn")


def _chunks(
    sequences: PackedSequences, share: ContextShare, causal: bool, window: int | None
) -> tuple[PackedSequences, Tensor]:
    """Queries with the keys each may see, and where these keys lie among the gathered ones."""
    device = sequences.device
    index = torch.arange(len(sequences.lengths), device=device)
    if not causal:
        keys = PackedSequences.of_lengths(share.real_lengths, device)
        return replace(sequences, context=None, keys=keys), share.rows_of(keys.expand(index), keys.positions)
    places = share.rank, 2 * share.size - 1 - share.rank
    chunks = [length // 2 for length in sequences.lengths]
    queries = PackedSequences.of_lengths([chunk for chunk in chunks for _ in places], device)
    skipped = [max(0, place * chunk - window) if window is not None else 0 for chunk in chunks for place in places]
    seen = [(place + 1) * chunk for chunk in chunks for place in places]
    keys = PackedSequences.of_lengths([stop - start for start, stop in zip(skipped, seen, strict=True)], device)
    starts = keys.expand(to_device(skipped, torch.int64, device))
    return replace(queries, keys=keys), share.rows_of(keys.expand(index.repeat_interleave(2)), starts + keys.positions)
