"""Mixers whose heads need all tokens of a sequence one after the other: ranks exchange tokens for heads."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from megalight.errors import LayoutError
from megalight.nn.mamba2 import AllTokens
from megalight.parallel.collectives import all_to_all
from megalight.parallel.context.exchange import trade_heads
from megalight.parallel.context.rows import take
from megalight.parallel.context.spec import ContextGroups
from megalight.types import PackedSequences


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
        return trade_heads(y, share.order, packed.num_tokens, self.groups.all)

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
