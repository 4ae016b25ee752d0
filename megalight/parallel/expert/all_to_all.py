"""MoE dispatch by all-to-all: every copy of a token is sent to the ranks of its expert, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.nn.moe import Grouped, aligned
from megalight.nn.moe.dispatch import HostCounts
from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.batch_invariant import refuse
from megalight.ops.permute import Permutation, permutation, permute, unpermute
from megalight.ops.router import Routes
from megalight.parallel.expert.dispatch import DISPATCHERS, ShardedDispatcher
from megalight.parallel.interleaved_passes import interleaving, pause


@dataclass(frozen=True)
class Traffic:
    """Numbers of rows between ranks.

    Attributes:
        send, receive: from this rank to each, and from each to this rank.
        table: ``table[source][to]`` between all ranks; empty if only this rank's are known.
    """

    send: list[int]
    receive: list[int]
    table: list[list[int]] = field(default_factory=list)

    @staticmethod
    def even(rows: int, ranks: int) -> Traffic:
        """Return the traffic in which each rank sends ``rows`` to each."""
        return Traffic.between_all([[rows] * ranks] * ranks, 0)

    @staticmethod
    def between_all(table: list[list[int]], rank: int) -> Traffic:
        """Return the traffic of rank ``rank``."""
        return Traffic(table[rank], [row[rank] for row in table], table)

    @property
    def back(self) -> Traffic:
        """The traffic with both ends exchanged: rows return the way they came."""
        return Traffic(self.receive, self.send, [list(column) for column in zip(*self.table, strict=True)])


Carry: TypeAlias = Callable[[Sequence[Tensor], Traffic], tuple[Tensor, ...]]
"""Sends rows, without autograd."""


def exchange(tensors: Sequence[Tensor], carry: Carry, traffic: Traffic) -> tuple[Tensor, ...]:
    """Of each tensor, send the first ``send[0]`` rows to rank 0, the next ``send[1]`` to rank 1, and so on.

    While the messages travel, another pass may compute (:mod:`megalight.parallel.interleaved_passes`).

    Returns:
        for each tensor, the rows from rank 0, then those from rank 1, and so on. The backward sends gradients back.
    """
    found: tuple[Tensor, ...] = apply(_Exchange, carry, traffic, *tensors)
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carry: Carry, traffic: Traffic, *tensors: Tensor) -> Any:
        ctx.carry, ctx.traffic = carry, traffic
        return carry(tensors, traffic)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.carry(grads, ctx.traffic.back)


def all_to_all(tensors: Sequence[Tensor], traffic: Traffic, group: ProcessGroup) -> tuple[Tensor, ...]:
    """Send rows by the collective."""
    send, receive = traffic.send, traffic.receive
    apart = interleaving()
    # Collectives send memory as it lies, and slices or expanded gradients have gaps.
    inputs = [x.contiguous() for x in tensors]
    outs = tuple(x.new_empty((sum(receive), *x.shape[1:])) for x in tensors)
    works = [
        # Asynchronous only if another pass can run meanwhile.
        dist.all_to_all_single(out, x, receive, send, group=group, async_op=apart)
        for out, x in zip(outs, inputs, strict=True)
    ]
    if apart:
        pause()
        for work in works:
            work.wait()  # inputs live until here: their memory must not be used again while it is read
    return outs


@dataclass(frozen=True)
class Padded:
    """Received rows, ``[ranks, experts, capacity]``, and rows of experts, ``[experts, rows]``.

    Attributes:
        ranks: number of ranks that send.
        experts: number of experts that are here.
        capacity: number of rows from each rank for each expert.
        rows: number of rows of each expert, at least ``ranks * capacity``; the rest are zeros.
    """

    ranks: int
    experts: int
    capacity: int
    rows: int

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each expert."""
        return [self.rows] * self.experts

    def offsets(self, device: torch.device) -> Tensor:
        """``[experts]`` int32: the end of each expert's rows. It is made on the device, which a graph can record."""
        return torch.arange(1, self.experts + 1, dtype=torch.int32, device=device) * self.rows

    def by_expert(self, received: Tensor) -> Tensor:
        """``[ranks * experts * capacity, ...] -> [experts * rows, ...]``."""
        rows = received.reshape(self.ranks, self.experts, self.capacity, *received.shape[1:])
        rows = rows.transpose(0, 1).flatten(1, 2)
        missing = self.rows - rows.shape[1]
        if missing:
            rows = F.pad(rows, (0, 0) * (rows.dim() - 2) + (0, missing))
        return rows.flatten(0, 1)

    def by_rank(self, outputs: Tensor) -> Tensor:
        """``[experts * rows, h] -> [ranks * experts * capacity, h]``: undo :meth:`by_expert`."""
        rows = outputs.reshape(self.experts, self.rows, *outputs.shape[1:])[:, : self.ranks * self.capacity]
        rows = rows.reshape(self.experts, self.ranks, self.capacity, *outputs.shape[1:])
        return rows.transpose(0, 1).flatten(0, 2)


@dataclass(frozen=True, eq=False)
class _Sent:
    """What ``combine`` needs to undo ``dispatch``.

    Attributes:
        copies: the row of each copy of this rank's tokens, in the order in which they were sent.
        traffic: numbers of rows between ranks.
        groups: the place of each received row among the rows of the experts.
    """

    copies: Permutation
    traffic: Traffic
    groups: Permutation | Padded


@DISPATCHERS.register("all_to_all")
class AllToAllDispatcher(ShardedDispatcher):
    """Sends copies to the ranks along ``ep`` that hold their experts. Along ``etp`` all get the same copies.

    Each rank along ``etp`` returns its term of the output, and :meth:`combine` adds them up. Ranks may have different
    numbers of tokens, also none, but all must call it at the same time.
    """

    def dispatch(
        self, hidden: Tensor, routes: Routes, num_experts: int, capacity: int | None = None
    ) -> tuple[Grouped, _Sent]:
        """Return the copies for this rank's experts.

        The host waits once, for the numbers of rows; not at all if ``capacity`` fixes them, and all ranks bring the
        same number of tokens.
        """
        refuse("experts on several ranks")
        group = self.shared.expert_group
        routes = spread(routes, num_experts, self.shared.mesh.etp)
        if capacity is not None and self.shared.equal_tokens(self, len(hidden), hidden.device):
            return self._dispatch_padded(hidden, routes, num_experts, capacity)
        # Sorted by expert over all ranks, so rows for one rank are contiguous: the all-to-all needs no further copy.
        copies = permutation(routes.experts, group.size() * num_experts, capacity=capacity)
        sizes = copies.offsets.diff(prepend=copies.offsets.new_zeros(1)).view(group.size(), num_experts)
        with _side_stream(sizes):
            # Counts first: a receiver must know how many rows come before it can allocate them.
            received, numbers = self.exchange_counts(sizes)
        # the copies are made while the numbers travel
        tokens, probs = permute(hidden, copies, routes.probs)
        assert probs is not None
        traffic, here = self.traffic(numbers, num_experts)
        # `received` was written on that stream, and is read below on this one.
        if hidden.is_cuda:
            current = torch.cuda.current_stream()
            current.wait_stream(_stream(hidden.device))
            received.record_stream(current)
        # Rows behind the last group belong to no copy, and are not sent.
        rows = sum(traffic.send)
        tokens, probs = exchange((tokens[:rows], probs[:rows]), self.carry, traffic)
        # Rows came rank by rank; grouped GEMMs need them expert by expert.
        sizes_here = [aligned(count, self.alignment) for count in here]
        groups = permutation(
            experts_of(received, sum(here)), num_experts, alignment=self.alignment, rows=sum(sizes_here)
        )
        # Weights travel with their rows: the experts multiply by them.
        tokens, weights = permute(tokens, groups, probs.unsqueeze(1))
        assert weights is not None
        sent = _Sent(replace(copies, rows=rows), traffic, groups)
        return Grouped(tokens, weights, groups.offsets, sizes_here), sent

    def _dispatch_padded(
        self, hidden: Tensor, routes: Routes, num_experts: int, capacity: int
    ) -> tuple[Grouped, _Sent]:
        """Send ``capacity`` rows to each expert of each rank. No number depends on the routes."""
        group = self.shared.expert_group
        ranks, traffic = group.size(), Traffic.even(num_experts * capacity, group.size())
        copies = permutation(routes.experts, ranks * num_experts, capacity=capacity)
        tokens, probs = permute(hidden, copies, routes.probs)
        assert probs is not None
        tokens, probs = exchange((tokens, probs), self.carry, traffic)
        padded = Padded(ranks, num_experts, capacity, aligned(ranks * capacity, self.alignment))
        tokens, probs = padded.by_expert(tokens), padded.by_expert(probs)
        grouped = Grouped(tokens, probs, padded.offsets(hidden.device), padded.sizes)
        return grouped, _Sent(copies, traffic, padded)

    def combine(self, outputs: Tensor, memo: _Sent) -> Tensor:
        """Send the outputs back, and add up those of each token."""
        groups = memo.groups
        rows = groups.by_rank(outputs) if isinstance(groups, Padded) else unpermute(outputs, groups)
        (back,) = exchange((rows,), self.carry, memo.traffic.back)
        return unpermute(back, memo.copies)

    def carry(self, tensors: Sequence[Tensor], traffic: Traffic) -> tuple[Tensor, ...]:
        """Send rows to other ranks, and return those that come, without autograd."""
        return all_to_all(tensors, traffic, self.shared.expert_group)

    def exchange_counts(self, sizes: Tensor) -> tuple[Tensor, HostCounts]:
        """Tell all ranks how many rows come, on the current stream.

        Args:
            sizes: ``[R, E]``: rows for each expert of each rank.

        Returns:
            ``[R, E]``: rows from each rank for each expert here; and what :meth:`traffic` needs on the host.
        """
        received = torch.empty_like(sizes)
        dist.all_to_all_single(received, sizes, group=self.shared.counts_group)
        # Three tables in one tensor: each copy to the host would be a wait of its own.
        return received, HostCounts(torch.cat([sizes.sum(1), received.sum(1), received.sum(0)]))

    def traffic(self, numbers: HostCounts, num_experts: int) -> tuple[Traffic, list[int]]:
        """Return the numbers of rows between ranks, and of those for each expert here. The host waits."""
        ranks = self.shared.expert_group.size()
        send, receive, here = numbers.wait(ranks, ranks, num_experts)
        return Traffic(send, receive), here


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all layers for exchanges of counts.

    torch has 32 streams and hands them out in turn. With one per layer, some would be those of reductions and gathers,
    for which the host would then wait. With high priority, the exchange does not wait for the products of others.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _side_stream(*counts: Tensor) -> AbstractContextManager[object]:
    """Run the exchange of counts on a stream of its own, beside the copies of the tokens."""
    if not counts[0].is_cuda:
        return nullcontext()
    stream = _stream(counts[0].device)
    stream.wait_stream(torch.cuda.current_stream())
    for tensor in counts:
        # Their memory must not be reused while the other stream still reads it.
        tensor.record_stream(stream)
    return torch.cuda.stream(stream)


def spread(routes: Routes, num_experts: int, etp: int) -> Routes:
    """Number the experts by rank of the group ``ep, etp``, and route to each of the ``etp`` ranks that share an expert.

    Args:
        routes: ``[T, k]``.
        num_experts: number of experts of each rank.
        etp: number of ranks that share an expert.

    Returns:
        ``[T, k * etp]``: expert ``e`` of rank ``r`` has the number ``r * num_experts + e``.
    """
    if etp == 1:
        return routes
    group, expert = routes.experts // num_experts, routes.experts % num_experts
    # The ranks that share an expert are neighbors, and each must get the copy.
    first = group.unsqueeze(-1) * etp + torch.arange(etp, device=group.device)
    experts = (first * num_experts + expert.unsqueeze(-1)).masked_fill(routes.experts.unsqueeze(-1) < 0, -1)
    probs = routes.probs.unsqueeze(-1).expand(-1, -1, etp)
    return Routes(probs.flatten(1), experts.flatten(1))


def experts_of(counts: Tensor, rows: int) -> Tensor:
    """``[rows, 1]``: the expert of each received row, found without waiting for the device.

    Args:
        counts: ``[R, L]``: rows from each rank for each expert; rows came rank by rank, and expert by expert within.
        rows: the sum of ``counts``.
    """
    expert = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return torch.repeat_interleave(expert, counts.flatten().long(), output_size=rows).unsqueeze(1)
