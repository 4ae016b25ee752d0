"""Slots of symmetric memory, used in turn by all ranks of a group, with flags that say who may do what.

Every rank can read and write its peers' part of a slot (``torch.distributed._symmetric_memory``). NVLink multicast is
never used: torch is told so before the first allocation.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Container, Iterable
from enum import IntEnum
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import MegalightError
from megalight.imports import has, has_symmetric_memory, symmetric_memory
from megalight.ops.common import cuda_why_not
from megalight.parallel.peers import driver

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
BUFFERS = "TORCH_SYMMMEM"
"""Environment variables that torch reads when it makes symmetric memory."""
SLOTS = 2
"""In turn: one is filled while peers still read the other."""
MOST_VIEWS = 256
"""Tensors in a memory that are remembered; each shape of micro-batch has its own."""


class Flag(IntEnum):
    """What a raised flag says. Each slot has one of each kind for every rank of the group.

    Attributes:
        FREE: the rank no longer needs what lay in the slot. Raised at the beginning.
        READY: the rank has put there what it has to put.
    """

    FREE = 0
    READY = 1


def why_not(device: str) -> str | None:
    """Why this process cannot have such memory on a type of device, or None."""
    if (reason := cuda_why_not(device)) is not None:
        return reason
    if not has_symmetric_memory():
        return (
            f"needs torch.distributed._symmetric_memory with CUDA peer buffers, which torch {torch.__version__} lacks"
        )
    if os.environ.get(NO_MULTICAST, "1") != "1":
        return f"goes without NVLink multicast, which {NO_MULTICAST}={os.environ[NO_MULTICAST]} asks for; set it to 1"
    if os.environ.get(BUFFERS, "CUDA") != "CUDA":
        return f"uses torch's own peer buffers, and {BUFFERS}={os.environ[BUFFERS]} asks for others; unset it"
    if not has("triton"):
        return "needs the package triton"
    return driver.why_not()


@lru_cache
def unreachable(group: ProcessGroup) -> str | None:
    """Why the ranks of a group cannot reach each other's memory, or None. They ask together, once."""
    own = torch.cuda.current_device()
    places: list[Any] = [None] * group.size()
    dist.all_gather_object(places, (socket.gethostname(), own), group=group)
    hosts, devices = {host for host, _ in places}, [device for _, device in places]
    if len(hosts) > 1:
        return f"needs all {group.size()} ranks on one host, and they are on {len(hosts)}"
    if len(set(devices)) < len(devices):
        return "needs processes that see all GPUs of the host; let CUDA_VISIBLE_DEVICES be the same for all of them"
    alone = [device for device in devices if device != own and not torch.cuda.can_device_access_peer(own, device)]
    # all ranks must answer alike, and a rank sees its own links only
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, alone, group=group)
    return "needs GPUs that reach each other's memory (NVLink)" if any(found) else None


class PeerMemory:
    """Slots that grow; ranks ask for equal sizes in the same order.

    Args:
        group: ranks of one host.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.others = tuple((self.rank + step) % self.size for step in range(1, self.size))
        self.capacity = 0
        self._flags: list[int] = []
        self._turn = 0
        self._handle: Any = None
        self._kept: list[Tensor] = []
        """Everything that was ever allocated: peers may still read what has been outgrown."""
        self._views: dict[tuple[Any, ...], Tensor] = {}

    def slot(self, nbytes: int, busy: Container[int] = ()) -> Slot:
        """The next slot, of at least so many bytes on every rank.

        The first call, and one that asks for more than any before, makes memory: all ranks wait for each other there.

        Args:
            busy: places that this rank is not through with. Peers would wait for it there without end.

        Raises:
            MegalightError: all are busy.
        """
        if not self._flags:
            words = self._allocate(SLOTS * len(Flag) * self.size * 4, free=True)
            self._flags = list(words.buffer_ptrs)
        if nbytes > self.capacity:
            self.capacity = 1 << (nbytes - 1).bit_length()
            self._handle = self._allocate(SLOTS * self.capacity)
            self._views.clear()
        for _ in range(SLOTS):
            self._turn = (self._turn + 1) % SLOTS
            if self._turn not in busy:
                return Slot(self, self._turn)
        raise MegalightError(f"all {SLOTS} slots of symmetric memory are in use: free what is gathered once it is read")

    def _allocate(self, nbytes: int, free: bool = False) -> Any:
        """Symmetric memory that is zero, or flags of which those of kind FREE are raised."""
        os.environ[NO_MULTICAST] = "1"
        device = torch.device("cuda", torch.cuda.current_device())
        memory = symmetric_memory().empty(nbytes, dtype=torch.uint8, device=device)
        # torch clears it on the default stream and does not wait: behind other work, a peer's first flag would be lost
        torch.cuda.default_stream(device).synchronize()
        if free:
            memory.view(torch.int32).view(SLOTS, len(Flag), -1)[:, Flag.FREE] = 1
            torch.cuda.current_stream().synchronize()
        self._kept.append(memory)
        return symmetric_memory().rendezvous(memory, self.group)

    def view(self, rank: int, place: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        """A tensor in the memory of a rank: in a slot, from element ``offset`` on."""
        key = rank, place, shape, dtype, offset
        if key not in self._views:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            first = place * self.capacity // dtype.itemsize + offset
            self._views[key] = self._handle.get_buffer(rank, shape, dtype, first)
        return self._views[key]

    def flag(self, rank: int, place: int, kind: Flag, column: int) -> int:
        """The address of a flag in the memory of a rank."""
        return self._flags[rank] + 4 * ((place * len(Flag) + kind) * self.size + column)


class Slot:
    """One slot, for one use.

    Args:
        memory: that it lies in.
        place: its number there.
    """

    def __init__(self, memory: PeerMemory, place: int) -> None:
        self.memory = memory
        self.place = place

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A tensor in the slot of a rank, from element ``offset`` on."""
        return self.memory.view(rank, self.place, shape, dtype, offset)

    def flags(self, kind: Flag, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those here that these ranks raise: their addresses."""
        return tuple(self.memory.flag(self.memory.rank, self.place, kind, rank) for rank in ranks)

    def flags_at(self, kind: Flag, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those that this rank raises at other ranks."""
        return tuple(self.memory.flag(rank, self.place, kind, self.memory.rank) for rank in ranks)
