"""All-to-all over heads (Ulysses, https://arxiv.org/abs/2309.14509).

A rank exchanges its tokens of all heads for all tokens of its heads. Attention then is the ordinary one over whole
sequences in natural order, with all its features. The cost is two all-to-alls of ``1 / n`` of the activations, for any
length. The number of ranks is limited by the number of heads.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.nn import InnerAttention
from megalight.parallel.collectives import all_to_all
from megalight.parallel.context.rows import put, take
from megalight.parallel.context.spec import ContextGroups, ContextSpec
from megalight.types import PackedSequences


def why_not(spec: ContextSpec) -> str | None:
    """Return why it cannot serve a layer, or None: the ranks must divide the heads."""
    return heads_why_not(spec, spec.cp)


def heads_why_not(spec: ContextSpec, ranks: int) -> str | None:
    """Return why the heads cannot be divided over ``ranks``; None if they can, or are unknown.

    Key heads are no problem: they divide the query heads and can be repeated.
    """
    if spec.heads is None or spec.heads[0] % ranks == 0:
        return None
    return f"has {spec.heads[0]} query heads for {ranks} ranks; the number of heads must be a multiple of the ranks"


def copies_of(kv_heads: int, ranks: int) -> int:
    """Return how often key heads are repeated so that they divide by ``ranks``; 1 if they already do."""
    return ranks // gcd(kv_heads, ranks)


def attend(
    inner: InnerAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    groups: ContextGroups,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's share: ``q [T, H, D], k, v [T, Hkv, D], sink [H] -> [T, H, D]``.

    Padding is removed on the way, so bidirectional attention needs no mask.
    """
    share = sequences.context
    assert share is not None and groups.all is not None
    whole = trade_tokens(q, k, v, share.order, groups.all)
    # `share.real` has no padding, so the mask of the plain attention is right.
    out = inner(*whole, share.real, None, sinks_of(sink, groups.all))
    return trade_heads(out, share.order, len(q), groups.all)


def sinks_of(sink: Tensor | None, group: ProcessGroup) -> Tensor | None:
    """Return the sinks of the heads that :func:`trade_tokens` gives to this rank."""
    # Gradients of the others are 0 here: ranks along `cp` add theirs up, as for every parameter.
    return None if sink is None else sink.view(group.size(), -1)[group.rank()]


def trade_tokens(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor | None, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange a share of the tokens of all heads for all tokens of a share of the heads, in one all-to-all.

    Args:
        q: ``[T, H, D]``.
        k: ``[T, Hkv, D]``; if there are too few heads, each is sent to several ranks.
        v: ``[T, Hkv, Dv]``.
        order: ``[N]``: the tokens to return, as indices into the concatenation of all ranks' tokens. None: all of them,
            in that order.
        group: a group of ``n`` ranks.

    Returns:
        ``[N, H / n, D]``, ``[N, Hkv / n, D]``, ``[N, Hkv / n, Dv]``: views of one tensor.
    """
    ranks = group.size()
    copies = copies_of(k.shape[1], ranks)
    if copies > 1:
        # Fewer key heads than ranks: every rank needs the key head of its query heads. Gradients of copies are summed
        # by autograd.
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    # `[n, T, heads / n * D]`: what goes to each rank is contiguous. One message carries q, k and v.
    parts = [x.reshape(len(x), ranks, -1).transpose(0, 1) for x in (q, k, v)]
    # All ranks' parts lie rank by rank here; `order` brings them to the order of the sequence.
    received = all_to_all(torch.cat(parts, -1).flatten(0, 1), group)
    if order is not None:
        received = take(received, order)
    sizes = [part.shape[-1] for part in parts]
    whole = zip(torch.split(received, sizes, -1), (q, k, v), strict=True)
    mine, keys, values = (part.view(len(part), -1, x.shape[-1]) for part, x in whole)
    return mine, keys, values


def trade_heads(out: Tensor, order: Tensor | None, tokens: int, group: ProcessGroup) -> Tensor:
    """Inverse of :func:`trade_tokens`: ``[N, H / n, D] -> [T, H, D]``. Tokens that are not in ``order`` are 0."""
    ranks = group.size()
    sent = out.flatten(1)
    if order is not None:
        sent = put(sent, order, ranks * tokens)
    received = all_to_all(sent, group)
    return received.view(ranks, tokens, -1).transpose(0, 1).reshape(tokens, -1, out.shape[-1])
