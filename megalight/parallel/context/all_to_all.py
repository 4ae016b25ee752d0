"""All-to-all over heads (Ulysses, https://arxiv.org/abs/2309.14509).

A rank exchanges its tokens of all heads for all tokens of its heads. Attention then is the ordinary one over whole
sequences in natural order, with all its features. The cost is two all-to-alls of ``1 / n`` of the activations, for any
length. The number of ranks is limited by the number of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import LayoutError
from megalight.nn import InnerAttention
from megalight.nn.mamba2 import AllTokens
from megalight.parallel.collectives import all_to_all
from megalight.parallel.context.spec import ContextGroups, ContextSpec, put, take
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
    whole = exchange_tokens(q, k, v, share.order, groups.all)
    # `share.real` has no padding, so the mask of the plain attention is right.
    out = inner(*whole, share.real, None, sinks_of(sink, groups.all))
    return exchange_heads(out, share.order, len(q), groups.all)


def sinks_of(sink: Tensor | None, group: ProcessGroup) -> Tensor | None:
    """Return the sinks of the heads that :func:`exchange_tokens` gives to this rank."""
    # Gradients of the others are 0 here: ranks along `cp` add theirs up, as for every parameter.
    return None if sink is None else sink.view(group.size(), -1)[group.rank()]


def exchange_tokens(
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


def exchange_heads(out: Tensor, order: Tensor | None, tokens: int, group: ProcessGroup) -> Tensor:
    """Inverse of :func:`exchange_tokens`: ``[N, H / n, D] -> [T, H, D]``. Tokens that are not in ``order`` are 0."""
    ranks = group.size()
    sent = out.flatten(1)
    if order is not None:
        sent = put(sent, order, ranks * tokens)
    received = all_to_all(sent, group)
    return received.view(ranks, tokens, -1).transpose(0, 1).reshape(tokens, -1, out.shape[-1])


class HeadShare(AllTokens):
    """Exchanges a share of the tokens of all heads for all tokens of a share of the heads.

    In generation, sequences are whole (``sequences.context`` is None), and every rank computes all heads.

    Args:
        name: name of the module, for messages.
        groups: the process groups.
        heads: numbers of heads and groups on this rank.

    Raises:
        LayoutError: the ranks do not divide the heads, or neither divide the groups nor are divided by them.
    """

    def __init__(self, name: str, groups: ContextGroups, heads: tuple[int, int]) -> None:
        super().__init__()
        self.name, self.groups = name, groups
        cp = groups.mesh.cp
        # Groups are repeated if there are fewer of them than ranks; heads cannot be.
        if heads[0] % cp or (heads[1] % cp and cp % heads[1]):
            raise LayoutError(
                f"{name}: {heads[0]} heads in {heads[1]} groups on each rank cannot be divided over cp={cp}: cp must "
                "divide the heads, and divide the groups or be a multiple of them. Choose another cp or tp."
            )

    def gather(
        self,
        rows: Tensor,
        dt: Tensor,
        sizes: tuple[int, int, int],
        units: tuple[int, int, int],
        packed: PackedSequences,
    ) -> tuple[Tensor, Tensor, PackedSequences]:
        """Return all tokens of this rank's share of the heads, in natural order and without padding."""
        share = packed.context
        if share is None:
            return rows, dt, packed
        if share.size != self.groups.mesh.cp:
            raise LayoutError(
                f"{self.name}: the sequences are cut into {share.size} shares, but cp={self.groups.mesh.cp}; cut them "
                "with zigzag(rank, size=cp)."
            )
        assert self.groups.all is not None
        # `[n, T, features]`: what goes to each rank is contiguous, and one message carries all
        parts = self._parts(torch.cat([rows, dt], 1), (*sizes, dt.shape[1]), (*units, dt.shape[1]), 1)
        sent = torch.cat(parts, -1).transpose(0, 1).flatten(0, 1)
        received = take(all_to_all(sent, self.groups.all), share.order)
        # The features of `dt` come last: they are split off again after the exchange.
        mine = dt.shape[1] // share.size
        whole, steps = torch.split(received, [received.shape[1] - mine, mine], -1)
        return whole, steps, share.real

    def restore(self, y: Tensor, packed: PackedSequences) -> Tensor:
        """Return all heads of this rank's share of the tokens."""
        share = packed.context
        if share is None:
            return y
        assert self.groups.all is not None
        return exchange_heads(y, share.order, packed.num_tokens, self.groups.all)

    def select(self, values: Tensor, sizes: tuple[int, ...], units: tuple[int, ...], packed: PackedSequences) -> Tensor:
        """Return the rows of this rank's share of the heads. Gradients of the other rows are 0 on this rank."""
        if packed.context is None:
            return values
        # All ranks along `cp` hold all values; their gradients are summed over ranks with those of replicas.
        return torch.cat([part[packed.context.rank] for part in self._parts(values, sizes, units, 0)])

    def _parts(self, values: Tensor, sizes: Sequence[int], units: Sequence[int], dim: int) -> list[Tensor]:
        """Cut each section along ``dim``, of ``sizes``, into equal shares: ``[..., n, share, ...]``."""
        ranks, parts = self.groups.mesh.cp, []
        for part, count in zip(torch.split(values, list(sizes), dim), units, strict=True):
            if (copies := ranks // gcd(count, ranks)) > 1:
                # fewer groups than ranks: each goes to all ranks with heads of it; autograd sums their gradients
                part = torch.unflatten(part, dim, (count, -1)).repeat_interleave(copies, dim).flatten(dim, dim + 1)
            parts.append(torch.unflatten(part, dim, (ranks, -1)))
        return parts


class RowAttention(nn.Module):
    """Attention of this rank's run of rows.

    Rows of images need no causal order, so a share need not be made of parts of every sequence. A rank exchanges
    its rows of all heads for all rows of its heads. Attention then is the ordinary one, inside images or windows.

    Args:
        inner: attention for one device.
        name: name of the module, for messages.
        groups: the process groups.
        heads: number of query heads and key heads on this rank.

    Raises:
        LayoutError: the ranks do not divide the heads.
    """

    def __init__(self, inner: InnerAttention, name: str, groups: ContextGroups, heads: tuple[int, int]) -> None:
        super().__init__()
        self.inner, self.groups = inner, groups
        cp = groups.mesh.cp
        if heads[0] % cp:
            raise LayoutError(
                f"{name}: {heads[0]} heads on each rank cannot be divided over cp={cp}, which must divide them. Choose "
                "another context_parallel or tensor_parallel of the tower."
            )

    @property
    def dropout(self) -> float:
        """Probability to drop an attention weight in training."""
        return self.inner.dropout

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, state: None = None, sink: None = None
    ) -> Tensor:
        """``q, k, v [P / cp, H, D] -> [P / cp, H, D]``; ``sequences`` describe all ``P`` rows."""
        group = self.groups.all
        assert group is not None
        whole = exchange_tokens(q, k, v, None, group)
        return exchange_heads(self.inner(*whole, sequences, state, sink), None, len(q), group)
