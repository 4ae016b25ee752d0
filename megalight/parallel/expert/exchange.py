"""The exchange of rows between ranks: an all-to-all with numbers of rows that differ from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.ops.common import apply, once_differentiable
from megalight.parallel.turns import pause, taking_turns


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

    While the messages travel, another pass may compute (:mod:`megalight.parallel.turns`).

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
    apart = taking_turns()
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
