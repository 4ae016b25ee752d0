"""Gather parameters by copy engines: each rank pushes its shard into the memory of its peers.

Copies occupy no multiprocessor, so the computation beside them keeps all of them. The memory is symmetric
(:mod:`megalight.parallel.peers`): buffers that units use in turn, or whole parameters. A rank may push into a buffer
once its owner no longer computes with the unit that was there, or with the last values of the parameters. All ranks
gather in the same order, so each wait is for something that the peer has queued before its own wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.parallel.data_parallel.buffers import FlatParameters
from megalight.parallel.data_parallel.flat_codes import FlatCodes
from megalight.parallel.data_parallel.ways import Choice
from megalight.parallel.ending import FAILED
from megalight.parallel.peers import driver
from megalight.parallel.peers.copies import Copies
from megalight.parallel.peers.memory import Flag, PeerMemory, Slot
from megalight.parallel.peers.watch import Watch


@dataclass(eq=False)
class _Buffer:
    """Memory of a bucket, with the same memory of the peers.

    Attributes:
        used: it holds values, so peers must learn when these are no longer needed.
        first: its first element in the memory.
    """

    memory: PeerMemory
    watch: Watch
    used: bool = False
    first: int = 0


class Pushes:
    """The buffers, and the copies into those of peers.

    Args:
        device: of the buffers.
        choice: decides which groups of ranks have buffers.

    Attributes:
        without: why some groups that were asked for have none.
    """

    def __init__(self, device: torch.device, choice: Choice) -> None:
        self.without: list[str] = []
        self._device, self._choice = device, choice
        self._copies = Copies()
        self._buffers: dict[int, _Buffer] = {}
        # Copies may still be on their way when a run is dropped, and they must not meet memory that is gone.
        weakref.finalize(self, finish, device).atexit = False

    def room(self, numel: int, dtype: torch.dtype, group: ProcessGroup) -> Tensor | None:
        """Allocate a buffer ``[numel]`` for units. The ranks of the group call this together, and in the same order.

        Returns:
            None if collectives gather among these ranks.
        """
        if (reason := self._choice.why_not_over(group)) is not None:
            self.without.append(reason)
            return None
        made = PeerMemory(group, slots=1, exact=True)
        made.reserve(numel * dtype.itemsize)
        own = made.view(made.rank, 0, (numel,), dtype, 0)
        self._buffers[own.data_ptr()] = _Buffer(made, Watch(made))
        return own

    def rooms(self, sizes: Sequence[int], dtype: torch.dtype, group: ProcessGroup) -> list[Tensor] | None:
        """Allocate memory ``[size]`` for buckets that stay whole, zero at first. Ranks call this as :meth:`room`.

        Peers do not write there before the first :meth:`gather`.

        Args:
            sizes: multiples of :data:`.memory.BOUNDARY` bytes.

        Returns:
            None if collectives gather among these ranks.
        """
        if (reason := self._choice.why_not_over(group)) is not None:
            self.without.append(reason)
            return None
        # One meeting for all of them. They share flags, as one is gathered after the other.
        made = PeerMemory(group, slots=1, exact=True, free=False)
        made.reserve(sum(sizes) * dtype.itemsize)
        watch, found, first = Watch(made), list[Tensor](), 0
        for size in sizes:
            found.append(made.own(size, dtype, first))
            self._buffers[found[-1].data_ptr()] = _Buffer(made, watch, used=True, first=first)
            first += size
        return found

    def keep(self, buckets: Iterable[FlatParameters | FlatCodes]) -> None:
        """Free the buffers in which none of these buckets lies. The ranks of their groups call this together."""
        used = {bucket.params.data_ptr() for bucket in buckets}
        leaving = {address: buffer for address, buffer in self._buffers.items() if address not in used}
        # Copies of this rank may be on their way into memory of peers, and copies of theirs into ours.
        finish(self._device)
        for group in {buffer.memory.group: None for buffer in leaving.values()}:
            dist.barrier(group)
        for address in leaving:
            del self._buffers[address]

    def gather(self, bucket: FlatParameters | FlatCodes) -> bool:
        """Gather a bucket on the current stream, which waits until all shards are there.

        Returns:
            whether the bucket lies in one of the buffers; if not, nothing has happened.

        Raises:
            MegalightError: in an earlier call, a peer was missing.
        """
        buffer = self._buffers.get(bucket.params.data_ptr())
        if buffer is None:
            return False
        buffer.watch.check()
        slot, others, stream = Slot(buffer.memory, 0), buffer.memory.others, torch.cuda.current_stream()
        if buffer.used:
            driver.raise_flags(stream, slot.flags_at(Flag.FREE, others))
        buffer.used = True
        spin = self._copies.spin
        spin.wait_with(buffer.watch, slot.flags(Flag.FREE, others), buffer.memory)
        own, first = bucket.own_params, bucket.kept[0]
        for to in others:
            driver.copy(stream, slot.view(to, tuple(own.shape), own.dtype, buffer.first + first), own)
            # Stream order makes the flag visible only after the data.
            driver.raise_flags(stream, slot.flags_at(Flag.READY, (to,)))
        place = bucket.params[slice(*bucket.kept)]
        if place.data_ptr() != own.data_ptr():  # whole parameters hold the shard itself
            driver.copy(stream, place, own)
        spin.wait_with(buffer.watch, slot.flags(Flag.READY, others), buffer.memory)
        return True


def finish(device: torch.device) -> None:
    """Wait for the copies of a run that is dropped."""
    # After an error the device may wait for peers that are gone.
    if device.type == "cuda" and not FAILED.is_set():
        torch.cuda.synchronize(device)
