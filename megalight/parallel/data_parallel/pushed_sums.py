"""Sum gradients over the GPUs of one host, where copy engines carry the terms.

Each rank pushes its term of a peer's interval into a slot of that peer's symmetric memory. The owner sums the terms in
the order of ranks, in float32, in one kernel. Copies occupy no multiprocessor, so the computation beside them keeps all
of them. An interval travels in pieces of the size of a slot: two slots in turn serve gradients of any size, and one
piece is summed while the next one travels.

All ranks sum the same gradients in the same order. So each wait is for something that the peer has queued before its
own wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.ops.sum_terms import sum_terms
from megalight.parallel.data_parallel.buffers import Bucket
from megalight.parallel.data_parallel.pushes import finish
from megalight.parallel.data_parallel.ways import Choice
from megalight.parallel.peers import driver
from megalight.parallel.peers.copies import Copies
from megalight.parallel.peers.memory import BOUNDARY, Flag, PeerMemory
from megalight.parallel.peers.watch import Watch

SLOT_BYTES = 64 << 20
"""Largest size of a slot, for the terms of all peers together. Larger ones gain nothing: a piece takes 0.2 ms."""


class PushedSums:
    """Slots for terms of gradients, and the copies into those of peers.

    Args:
        device: of the gradients.

    Attributes:
        without: why some groups that were asked for have no slots.
    """

    def __init__(self, device: torch.device) -> None:
        self.without: list[str] = []
        self._copies = Copies()
        self._slots: dict[ProcessGroup, tuple[PeerMemory, Watch]] = {}
        # Copies may still be on their way when a run is dropped, and they must not meet memory that is gone.
        weakref.finalize(self, finish, device).atexit = False

    def serve(self, buckets: Sequence[Bucket], wire_dtype: torch.dtype | None, choice: Choice) -> None:
        """Let the gradients of units be summed here; those of all buckets, if none is reduced by units.

        Args:
            buckets: all of them. Their ranks call this together.
            wire_dtype: dtype in which gradients are sent; None: that of the buffers.
            choice: decides which groups of ranks do so.
        """
        # Others may be sent at different times on different ranks: those of a parameter that a rank does not use come
        # last there. Where they met gradients of units, ranks would wait for each other.
        for bucket in [bucket for bucket in buckets if bucket.shards_grads] or buckets:
            if bucket.shard_group is None:
                continue
            if (reason := choice.why_not_over(bucket.shard_group)) is not None:
                self.without.append(reason)
                continue
            itemsize = (wire_dtype or bucket.grads.dtype).itemsize
            self.reserve(bucket.shard_group, (bucket.kept[1] - bucket.kept[0]) * itemsize)

    def reserve(self, group: ProcessGroup, nbytes: int) -> None:
        """Let the ranks of a group sum gradients. They call this together, and in the same order.

        Args:
            group: ranks among which gradients are divided, that copy engines may serve (:meth:`.Choice.why_not_over`).
            nbytes: the largest interval that a rank will sum; larger ones travel in more pieces.
        """
        if group not in self._slots:
            made = PeerMemory(group, exact=True)
            self._slots[group] = made, Watch(made)
        made, _ = self._slots[group]
        peers = len(made.others)
        # Each term begins at a boundary.
        row = min(-(-nbytes // BOUNDARY), SLOT_BYTES // peers // BOUNDARY) * BOUNDARY
        made.reserve(peers * max(row, BOUNDARY))

    def serves(self, group: ProcessGroup | None) -> bool:
        """Whether the ranks of a group have slots."""
        return group in self._slots

    def sum(self, terms: Tensor, group: ProcessGroup, out: Tensor, add: bool) -> None:
        """Sum gradients on the current stream, which waits until all terms are there.

        Args:
            terms: ``[numel]``, this rank's term of all intervals, one after the other. Free again when the stream is
                done.
            group: a group with slots.
            out: ``[numel / ranks]``, where the sum of this rank's interval goes; it may be this interval of ``terms``.
            add: add the sum to it instead.

        Raises:
            MegalightError: in an earlier call, a peer was missing.
        """
        made, watch = self._slots[group]
        watch.check()
        others, rank = made.others, made.rank
        current, copies, spin = torch.cuda.current_stream(), self._copies, self._copies.spin
        length, most = len(terms) // made.size, made.capacity // len(others) // BOUNDARY * BOUNDARY // terms.itemsize
        copies.stream.wait_stream(current)
        for first in range(0, length, most):
            slot, piece = made.slot(0), slice(first, min(first + most, length))
            own = terms[rank * length + piece.start : rank * length + piece.stop]
            shape, dtype = tuple(own.shape), own.dtype
            with torch.cuda.stream(copies.stream):
                spin.wait_with(watch, slot.flags(Flag.FREE, others), made)
            for to in others:
                # The owner has a row for each of its peers, in the order of ranks.
                row = slot.view(to, shape, dtype, (rank - (rank > to)) * most)
                copies.push(slot, to, (row, terms[to * length + piece.start : to * length + piece.stop]))
            spin.wait_with(watch, slot.flags(Flag.READY, others), made)
            rows = [slot.view(rank, shape, dtype, row * most) for row in range(len(others))]
            sum_terms(out[piece], own, rows, rank, add=add)
            driver.raise_flags(current, slot.flags_at(Flag.FREE, others))
        # The terms have left, too.
        current.wait_stream(copies.stream)
