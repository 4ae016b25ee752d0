"""Dispatch by copies between GPUs of one host, through symmetric memory. Copy engines do the work, no SM.

Each rank pushes its rows to their places in the other ranks' slots (:mod:`megalight.parallel.peers`). So it must know
how many rows every rank sends to every other: the numbers are gathered, and not exchanged in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import LayoutError
from megalight.nn.moe.dispatch import HostCounts
from megalight.parallel.collectives import as_bytes, start_all_gather
from megalight.parallel.expert.all_to_all import AllToAllDispatcher, Traffic
from megalight.parallel.expert.dispatch import DISPATCHERS
from megalight.parallel.interleaved_passes import interleaving, pause
from megalight.parallel.peers import memory, spin
from megalight.parallel.peers.memory import BOUNDARY, Flag, PeerMemory
from megalight.parallel.peers.spin import PeerCopyStream, Watch

if TYPE_CHECKING:
    from megalight.parallel.shared_state import SharedState


@DISPATCHERS.register("symmetric")
class SymmetricDispatcher(AllToAllDispatcher):
    """Sends copies as ``all_to_all`` does, by copy engines.

    Raises:
        LayoutError: this machine has no symmetric memory. :meth:`connect`: the ranks cannot reach each other's.
    """

    def __init__(self, shared: SharedState) -> None:
        super().__init__(shared)
        if (reason := memory.why_not("cuda")) is not None:
            raise _refusal(reason)

    def connect(self) -> None:
        """Make what all layers share; the ranks along ``ep`` and ``etp`` call this together."""
        _ = self.shared.peer_exchange

    def carry(self, tensors: Sequence[Tensor], traffic: Traffic) -> tuple[Tensor, ...]:
        """Send rows through the memory that all layers share."""
        return self.shared.peer_exchange(tensors, traffic)

    def exchange_counts(self, sizes: Tensor) -> tuple[Tensor, HostCounts]:
        """Return the rows from each rank for each expert here, and the table of all ranks on its way to the host."""
        group = self.shared.counts_group
        table = start_all_gather(sizes.unsqueeze(0), group).wait()
        received = table[:, group.rank()]
        return received, HostCounts(torch.cat([table.sum(2).flatten(), received.sum(0)]))

    def traffic(self, numbers: HostCounts, num_experts: int) -> tuple[Traffic, list[int]]:
        """Return the numbers of rows between all ranks, and of those for each expert here."""
        group = self.shared.counts_group
        size = group.size()
        *table, here = numbers.wait(*[size] * size, num_experts)
        return Traffic.between_all(table, group.rank()), here


def _refusal(reason: str) -> LayoutError:
    return LayoutError(
        f"ExpertOptions: dispatcher='symmetric' cannot serve: it {reason}. Set dispatcher='all_to_all', which works "
        "everywhere."
    )


@dataclass(frozen=True)
class Regions:
    """Where rows stand in the slots of the ranks: arithmetic only.

    A slot has the rows of the first tensor, from all ranks in order, then those of the next.

    Attributes:
        table: ``table[source][to]``: how many rows go from one rank to another.
        widths: bytes of a row of each tensor.
    """

    table: Sequence[Sequence[int]]
    widths: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes of the largest slot. All ranks must ask for equal sizes."""
        return max(self._ends(to)[-1] for to in range(len(self.table)))

    def place(self, tensor: int, source: int, to: int) -> slice:
        """Return the bytes in the slot of rank ``to`` for the rows of a tensor from rank ``source``."""
        before = sum(row[to] for row in self.table[:source])
        start = self._ends(to)[tensor] + before * self.widths[tensor]
        return slice(start, start + self.table[source][to] * self.widths[tensor])

    def arrived(self, tensor: int, to: int) -> slice:
        """Return the bytes of all rows of a tensor."""
        start = self._ends(to)[tensor]
        return slice(start, start + sum(row[to] for row in self.table) * self.widths[tensor])

    def _ends(self, to: int) -> list[int]:
        rows = sum(row[to] for row in self.table)
        return [0, *accumulate(-(-rows * width // BOUNDARY) * BOUNDARY for width in self.widths)]


class PeerExchange:
    """Exchanges rows through slots of symmetric memory. All layers of a model share it.

    Args:
        group: ranks of one host.

    Raises:
        LayoutError: the ranks cannot reach each other's memory.
        MegalightError: at a call: in an earlier one, a peer has not sent its rows within the timeout of the group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        if (reason := memory.unreachable(group)) is not None:
            raise _refusal(reason)
        self.memory, self.copies = PeerMemory(group), PeerCopyStream()
        self.watch = Watch(self.memory)
        self._busy: set[int] = set()

    def __call__(self, tensors: Sequence[Tensor], traffic: Traffic) -> tuple[Tensor, ...]:
        """Return the rows for this rank, as :func:`megalight.parallel.expert.all_to_all.exchange` does."""
        self.watch.check()
        rank, apart = self.memory.rank, interleaving()
        inputs = [x.contiguous() for x in tensors]
        regions = Regions(traffic.table, [prod(x.shape[1:]) * x.itemsize for x in inputs])
        outs = tuple(x.new_empty((sum(traffic.receive), *x.shape[1:])) for x in inputs)
        # All ranks see the same table, and come to the same answer.
        if not regions.nbytes:
            if apart:  # elsewhere a group with rows ends its turn here, and all must take turns alike
                pause()
            return outs
        slot = self.memory.slot(regions.nbytes, self._busy)
        self._busy.add(slot.place)
        # Kept over the pause: the other pass may make the memory grow, and what is on its way is in the old one.
        slots = [slot.view(to, (self.memory.capacity,), torch.uint8) for to in range(self.memory.size)]
        leaving = [as_bytes(x) for x in inputs]
        current = torch.cuda.current_stream()
        starts = [0, *accumulate(traffic.send)]
        try:
            self.copies.stream.wait_stream(current)  # the rows must be computed before they are copied
            self.copies.await_free(slot)
            for to in self.memory.others:
                pairs = []
                for number, (source, width) in enumerate(zip(leaving, regions.widths, strict=True)):
                    if traffic.send[to] and width:
                        rows = source[starts[to] * width : starts[to + 1] * width]
                        pairs.append((slots[to][regions.place(number, rank, to)], rows))
                # The flag is raised also without rows: the receiver waits for every rank.
                self.copies.push(slot, to, *pairs)
            left = self.copies.stream.record_event()
        except BaseException:
            # Nothing will be read from it: a later call must not find all slots busy, and hide this error.
            self._busy.discard(slot.place)
            raise
        try:
            if apart:
                pause()
        finally:
            # Also if the pass was abandoned in its pause. The peers have sent their rows, and would wait for this slot
            # in the next step, forever.
            current = torch.cuda.current_stream()
            spin.wait_with(self.watch, slot.flags(Flag.READY, self.memory.others))
            for number, (out, source, width) in enumerate(zip(outs, leaving, regions.widths, strict=True)):
                # Out of the slot at once: it must be free again soon, or the peers wait.
                target, place = as_bytes(out), regions.arrived(number, rank)
                own = regions.place(number, rank, rank)
                before, after = own.start - place.start, own.stop - place.start
                target[:before].copy_(slots[rank][place.start : own.start])
                target[after:].copy_(slots[rank][own.stop : place.stop])
                target[before:after].copy_(source[starts[rank] * width : starts[rank + 1] * width])
            # The rows leave with this event: until then their memory must not be written again.
            current.wait_event(left)
            self.copies.free(slot)
            self._busy.discard(slot.place)
        return outs
