"""Messages between stages on GPUs of one host, by copy engines: no multiprocessor is occupied, not even by a wait.

The sender pushes a message into a slot on the receiver, on a stream of its own. The receiver's stream waits for the
flag when it needs the message, copies it out of the slot, and frees the slot (:mod:`megalight.parallel.peers`).

A push waits until its slot is free, and may hold up everything else that its rank has queued. So there are as many
slots as the timeline needs (:attr:`~megalight.parallel.pipeline.agenda.Agenda.slots`): a push waits only for work that
began before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.parallel.capturing import capturing
from megalight.parallel.peers.copies import Copies
from megalight.parallel.peers.memory import Flag, PeerMemory, Slot
from megalight.parallel.peers.watch import Watch
from megalight.parallel.pipeline.p2p import Channel, Message

BOUNDARY = 256
"""Each tensor of a message begins at a multiple of so many bytes."""


class Line:
    """Slots of two neighbors, for messages in both directions.

    They grow between runs of a schedule. Messages that do not fit go by collectives, so those of a first run do. Both
    ends see the same messages, so they decide alike.

    Args:
        group: the two ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.memory: PeerMemory | None = None
        self.watch: Watch | None = None
        self.open = False
        self._largest = 0
        self._replaced: list[tuple[PeerMemory, Watch | None]] = []
        """Kept for good: recorded graphs hold their addresses."""

    def prepare(self, slots: int) -> None:
        """Make room for the largest message so far. Both ends call this together, before a run.

        Args:
            slots: number of slots in each direction that the run needs.
        """
        # Nothing can be allocated in a capture, and the runs before it were of the same kind.
        if self._largest and not capturing():
            if self.memory is None or self.memory.slots < slots:
                if self.memory is not None:
                    self._replaced.append((self.memory, self.watch))
                self.memory = PeerMemory(self.group, slots)
                self.watch = Watch(self.memory)
            self.memory.reserve(self._largest)
        self.open = self.memory is not None and self.memory.slots >= slots

    def slot(self, number: int, nbytes: int) -> Slot | None:
        """Return the slot of a message, or None if the message does not fit.

        Args:
            number: number of messages through slots before it, in its direction.

        Raises:
            MegalightError: the other rank is gone.
        """
        self._largest = max(self._largest, nbytes)
        if self.memory is None or self.watch is None or not self.open or nbytes > self.memory.capacity:
            return None
        self.watch.check()
        return Slot(self.memory, number % self.memory.slots)


class PeerChannel(Channel):
    """A channel whose messages go through slots.

    Args:
        peer, group, host_group: as in :class:`Channel`.
        line: slots shared with the channel in the other direction.
    """

    def __init__(self, peer: int, group: ProcessGroup, host_group: ProcessGroup, line: Line) -> None:
        super().__init__(peer, group, host_group)
        self.line = line
        self.copies = Copies()
        self._number = 0

    def send(self, tensors: Sequence[Tensor]) -> Message:
        """Start to push tensors."""
        whole = [tensor.detach().contiguous() for tensor in tensors]
        if (slot := self._next(whole)) is None:
            return self._start(dist.isend, whole)
        (other,) = slot.memory.others
        self.copies.stream.wait_stream(torch.cuda.current_stream())  # they must be computed before they are copied
        self.copies.await_free(slot)
        self.copies.push(slot, other, *zip(places(slot, other, whole), full(whole), strict=True))
        return Message(whole, [Leaving(self.copies.stream.record_event())])

    def receive(self, buffers: Sequence[Tensor]) -> Message:
        """Prepare to receive into ``buffers``. Nothing waits on the device before the message is used."""
        if (slot := self._next(buffers)) is None:
            return self._start(dist.irecv, list(buffers))
        return Message(list(buffers), [Arrival(self, slot, list(buffers))])

    def _next(self, tensors: Sequence[Tensor]) -> Slot | None:
        *_, nbytes = offsets(tensors)
        slot = self.line.slot(self._number, nbytes) if nbytes else None
        self._number += slot is not None
        return slot


@dataclass(frozen=True)
class Leaving:
    """A message on its way out."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """Let the current stream wait: then the memory of the message may be written again."""
        torch.cuda.current_stream().wait_event(self.event)

    def is_completed(self) -> bool:
        """Whether the copies are done."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Arrival:
    """A message that a slot receives."""

    channel: PeerChannel
    slot: Slot
    buffers: list[Tensor]

    def wait(self) -> None:
        """Let the current stream wait for the message, copy it out and free the slot."""
        memory, copies = self.slot.memory, self.channel.copies
        assert self.channel.line.watch is not None
        copies.spin.wait_with(self.channel.line.watch, self.slot.flags(Flag.READY, memory.others), memory)
        for place, buffer in zip(places(self.slot, memory.rank, self.buffers), full(self.buffers), strict=True):
            # Out of the slot at once: activations are kept until their backward, and the slot is needed sooner.
            buffer.copy_(place)
        copies.free(self.slot)

    def is_completed(self) -> bool:
        """Return False: only :meth:`wait` knows, and it is called once."""
        return False


def full(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that have elements; the others need no copy."""
    return [tensor for tensor in tensors if tensor.numel()]


def offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Return where each tensor with elements begins in a slot, in bytes, and then the bytes of all."""
    return [0, *accumulate(-(-tensor.nbytes // BOUNDARY) * BOUNDARY for tensor in full(tensors))]


def places(slot: Slot, rank: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the places of tensors with elements in the slot of a rank."""
    pairs = zip(full(tensors), offsets(tensors), strict=False)
    return [slot.view(rank, tuple(x.shape), x.dtype, start // x.itemsize) for x, start in pairs]
