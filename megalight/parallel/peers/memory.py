"""Slots of symmetric memory that all ranks of a group use in turn, with flags that control access.

Every rank can read and write its peers' part of a slot (``torch.distributed._symmetric_memory``). NVLink multicast is
never used; an environment variable disables it before the first allocation.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Container, Iterable
from enum import IntEnum
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from megalight.errors import MegalightError
from megalight.imports import has, has_symmetric_memory, symmetric_memory
from megalight.ops.common import cuda_why_not
from megalight.parallel.mesh import shared_group
from megalight.parallel.peers import driver

LEAST_BYTES = 16


class Rendezvous:
    """All meetings of a process.

    torch names a meeting by a number that counts those of the whole process (pytorch/pytorch issue 196082). Ranks
    with different numbers would wait for each other for ever: stages inside a pipeline have two neighbors, the
    first has one. So ranks that are behind first meet with nobody, until all numbers are equal.

    Attributes:
        count: their number so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._of_groups: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()

    def meet(self, memory: Tensor, group: ProcessGroup) -> Any:
        """Return torch's handle of ``memory`` on all ranks of the group. They call this together.

        Args:
            memory: this rank's part, symmetric memory of torch.
        """
        latest = max(self._counts(group))
        while self.count < latest:
            alone = symmetric_memory().empty(LEAST_BYTES, dtype=torch.uint8, device=memory.device)
            self._meet(alone, shared_group((dist.get_rank(),), "symmetric memory"))
        return self._meet(memory, group)

    def _counts(self, group: ProcessGroup) -> list[int]:
        """Return the numbers of all ranks, by the group's store: no tensor may leave a recorded step."""
        number = self._of_groups[group] = self._of_groups.get(group, 0) + 1
        store = dist.PrefixStore(f"meeting {number}", c10d._get_process_group_store(group))
        store.set(str(group.rank()), str(self.count))
        return [int(store.get(str(rank))) for rank in range(group.size())]

    def _meet(self, memory: Tensor, group: ProcessGroup) -> Any:
        self.count += 1
        return symmetric_memory().rendezvous(memory, group)


MEETINGS = Rendezvous()
"""Those of this process."""

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
BUFFERS = "TORCH_SYMMMEM"
"""Environment variables that torch reads when it allocates symmetric memory."""
SLOTS = 2
"""Number of slots where the user asks for no other, used in turn: one is filled while peers still read the other."""
BOUNDARY = 256
"""Bytes: tensors in a slot begin at a multiple of it, and slots of an exact size are multiples of it."""
MOST_VIEWS = 4096
"""Largest number of cached views of a memory; each shape of micro-batch has its own, and each bucket of parameters."""


class Flag(IntEnum):
    """The meaning of a raised flag. Each slot has one flag of each kind for every rank of the group.

    Attributes:
        FREE: the rank no longer needs the contents of the slot. Raised at the beginning.
        READY: the rank has written its data into the slot.
    """

    FREE = 0
    READY = 1


def why_not(device: str) -> str | None:
    """Return why this process cannot have symmetric memory on a device type, or None."""
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
    """Return why the ranks of a group cannot reach each other's memory, or None. All ranks call this together, once."""
    own = torch.cuda.current_device()
    places: list[Any] = [None] * group.size()
    dist.all_gather_object(places, (socket.gethostname(), own), group=group)
    hosts, devices = {host for host, _ in places}, [device for _, device in places]
    if len(hosts) > 1:
        return f"needs all {group.size()} ranks on one host, and they are on {len(hosts)}"
    if len(set(devices)) < len(devices):
        return "needs processes that see all GPUs of the host; let CUDA_VISIBLE_DEVICES be the same for all of them"
    alone = [device for device in devices if device != own and not torch.cuda.can_device_access_peer(own, device)]
    # All ranks must return the same answer, but each one only sees its own links.
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, alone, group=group)
    return "needs GPUs that reach each other's memory (NVLink)" if any(found) else None


_MADE: WeakSet[PeerMemory] = WeakSet()


def held() -> int:
    """Return the bytes of symmetric memory that this process has. They are not among those of torch's allocator."""
    return sum(memory.nbytes for memory in _MADE)


def allocated(device: torch.device) -> int:
    """Return the bytes in use on a GPU: those of torch's allocator, and symmetric memory."""
    return torch.cuda.memory_allocated(device) + held()


def peak_allocated(device: torch.device) -> int:
    """Return the most bytes in use on a GPU since torch's peak was reset. Symmetric memory grows and never shrinks."""
    return torch.cuda.max_memory_allocated(device) + held()


class PeerMemory:
    """Slots of symmetric memory that grow; all ranks request equal sizes in the same order.

    Args:
        group: ranks of one host.
        slots: number of slots.
        exact: slots have no more bytes than are asked for. Otherwise sizes are powers of two, so that they grow in few
            steps.
        free: peers may write into slots from the beginning. False: only once this rank has raised its flags.
    """

    def __init__(self, group: ProcessGroup, slots: int = SLOTS, exact: bool = False, free: bool = True) -> None:
        self.group = group
        self.slots = slots
        self.exact = exact
        self.free = free
        self.rank, self.size = group.rank(), group.size()
        # Each rank begins with another neighbor: otherwise all would push to rank 0 at once.
        self.others = tuple((self.rank + step) % self.size for step in range(1, self.size))
        self.capacity = 0
        self._flags: list[int] = []
        self._turn = 0
        self._handle: Any = None
        self._kept: list[Tensor] = []
        """All memory ever allocated: peers may still read memory that was replaced by a larger one."""
        self._views: dict[tuple[Any, ...], Tensor] = {}
        _MADE.add(self)

    @property
    def nbytes(self) -> int:
        """Size of all memory of this rank."""
        return sum(memory.nbytes for memory in self._kept)

    @property
    def has_flags(self) -> bool:
        """Whether a slot was asked for; the first call makes the flags."""
        return bool(self._flags)

    def slot(self, nbytes: int, busy: Container[int] = ()) -> PeerSlot:
        """Return the next slot, with at least ``nbytes`` bytes on every rank.

        The first call, and every call for more bytes than before, allocates memory; all ranks wait for each other
        there.

        Args:
            busy: places that this rank still uses. Peers would wait forever for one of these to become free.

        Raises:
            MegalightError: all slots are busy.
        """
        self.reserve(nbytes)
        for _ in range(self.slots):
            self._turn = (self._turn + 1) % self.slots
            if self._turn not in busy:
                return PeerSlot(self, self._turn)
        raise MegalightError(
            f"all {self.slots} slots of symmetric memory are in use: free what is gathered once it is read"
        )

    def restart(self) -> None:
        """Let the next slot be the one after the first; all ranks call this together."""
        self._turn = 0

    def reserve(self, nbytes: int) -> None:
        """Let every slot have at least ``nbytes`` bytes on every rank. All ranks wait for each other if it grows."""
        # Flags have memory of their own, which never grows: cached operations and recorded
        # graphs hold their addresses.
        if not self._flags:
            words = self._allocate(self.slots * len(Flag) * self.size * 4, free=self.free)
            self._flags = list(words.buffer_ptrs)
        if nbytes > self.capacity:
            self.capacity = -(-nbytes // BOUNDARY) * BOUNDARY if self.exact else 1 << (nbytes - 1).bit_length()
            self._handle = self._allocate(self.slots * self.capacity)
            # Views of the old memory would write where no peer reads any more.
            self._views.clear()

    def _allocate(self, nbytes: int, free: bool = False) -> Any:
        """Allocate zeroed symmetric memory; ``free``: for flags, with those of kind FREE raised."""
        os.environ[NO_MULTICAST] = "1"
        device = torch.device("cuda", torch.cuda.current_device())
        memory = symmetric_memory().empty(nbytes, dtype=torch.uint8, device=device)
        # torch zeroes the memory on the default stream without waiting. If that ran late, it would erase a peer's first
        # flag.
        torch.cuda.default_stream(device).synchronize()
        if free:
            memory.view(torch.int32).view(self.slots, len(Flag), -1)[:, Flag.FREE] = 1
            # Peers may write to flags as soon as they have the addresses, so these must be set before.
            torch.cuda.current_stream().synchronize()
        self._kept.append(memory)
        return MEETINGS.meet(memory, self.group)

    def view(self, rank: int, place: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        """Return a tensor in a slot of a rank's memory, from element ``offset`` on."""
        key = rank, place, shape, dtype, offset
        if key not in self._views:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            # A slot begins at a whole element of any dtype: capacities are powers of two, or multiples of BOUNDARY.
            first = place * self.capacity // dtype.itemsize + offset
            self._views[key] = self._handle.get_buffer(rank, shape, dtype, first)
        return self._views[key]

    def own(self, numel: int, dtype: torch.dtype, offset: int) -> Tensor:
        """Return ``[numel]`` elements of this rank's memory, from element ``offset`` on.

        The memory stays as long as they do. Views of :meth:`view` need this object.
        """
        return self._kept[-1].view(dtype)[offset : offset + numel]

    def flag(self, rank: int, place: int, kind: Flag, column: int) -> int:
        """Return the address of a flag in a rank's memory."""
        # One word for each peer, so that no two ever write to the same one.
        return self._flags[rank] + 4 * ((place * len(Flag) + kind) * self.size + column)


class PeerSlot:
    """One slot, for one use.

    Args:
        memory: the memory that holds the slot.
        place: the slot's index in it.
    """

    def __init__(self, memory: PeerMemory, place: int) -> None:
        self.memory = memory
        self.place = place

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Return a tensor in the slot of a rank, from element ``offset`` on."""
        return self.memory.view(rank, self.place, shape, dtype, offset)

    def flags(self, kind: Flag, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the addresses of this rank's flags that the given ranks raise."""
        return tuple(self.memory.flag(self.memory.rank, self.place, kind, rank) for rank in ranks)

    def flags_at(self, kind: Flag, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the addresses of the flags that this rank raises on the given ranks."""
        return tuple(self.memory.flag(rank, self.place, kind, self.memory.rank) for rank in ranks)
