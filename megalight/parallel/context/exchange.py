"""All-to-all over heads (Ulysses, arXiv 2309.14509): a rank trades its tokens of all heads for all tokens of its heads.

Attention is then the ordinary one over whole sequences in natural order, with all it can do. It costs two all-to-alls
of ``1 / n`` of the activations, whatever the length, and lasts as far as there are heads.
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
    """Heads must divide."""
    return heads_why_not(spec, spec.cp)


def heads_why_not(spec: ContextSpec, ranks: int) -> str | None:
    """Why the heads of ``spec`` cannot be spread over ``ranks``; None when they can, or are not known yet.

    Key heads never stand in the way: they divide the query heads and can be repeated.
    """
    if spec.heads is None or spec.heads[0] % ranks == 0:
        return None
    return f"has {spec.heads[0]} query heads for {ranks} ranks; the ranks must divide them"


def copies_of(kv_heads: int, ranks: int) -> int:
    """How often each key head must be repeated so that every rank gets equally many: 1 where ``ranks`` divides them."""
    return ranks // gcd(kv_heads, ranks)


def attend(
    inner: InnerAttention, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, groups: ContextGroups
) -> Tensor:
    """This rank's share of attention: ``q [T, H, D], k, v [T, Hkv, D] -> [T, H, D]``.

    Padding takes no part, so bidirectional attention needs no mask for it.
    """
    share = sequences.context
    assert share is not None and groups.all is not None
    whole = trade_tokens(q, k, v, share.order, groups.all)
    return trade_heads(inner(*whole, share.real), share.order, len(q), groups.all)


def trade_tokens(q: Tensor, k: Tensor, v: Tensor, order: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """A share of the tokens of all heads -> all tokens of a share of the heads, in one all-to-all.

    Args:
        q: ``[T, H, D]``.
        k: ``[T, Hkv, D]``; heads too few for all ranks are sent to several.
        v: ``[T, Hkv, Dv]``.
        order: ``[N]``, the tokens wanted, as their places among those of all ranks, laid one after another.
        group: of ``n`` ranks.

    Returns:
        ``[N, H / n, D]``, ``[N, Hkv / n, D]``, ``[N, Hkv / n, Dv]``: views of one tensor.
    """
    ranks = group.size()
    copies = copies_of(k.shape[1], ranks)
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    parts = [x.reshape(len(x), ranks, -1).transpose(0, 1) for x in (q, k, v)]
    received = take(all_to_all(torch.cat(parts, -1).flatten(0, 1), group), order)
    sizes = [part.shape[-1] for part in parts]
    whole = zip(torch.split(received, sizes, -1), (q, k, v), strict=True)
    mine, keys, values = (part.view(len(part), -1, x.shape[-1]) for part, x in whole)
    return mine, keys, values


def trade_heads(out: Tensor, order: Tensor, tokens: int, group: ProcessGroup) -> Tensor:
    """The way back: ``[N, H / n, D]`` -> ``[T, H, D]`` for this rank's ``T`` tokens; those not in ``order`` are 0."""
    ranks = group.size()
    received = all_to_all(put(out.flatten(1), order, ranks * tokens), group)
    return received.view(ranks, tokens, -1).transpose(0, 1).reshape(tokens, -1, out.shape[-1])
