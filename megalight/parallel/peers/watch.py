"""A limit on waits for peers: a rank whose peer is gone names it, and does not wait for ever."""

from __future__ import annotations

from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import MegalightError
from megalight.parallel.peers.memory import Flag, PeerMemory

DEFAULT_LIMIT = 1800.0
"""Seconds, where the group does not tell how long its collectives wait."""

_WATCHES: WeakSet[Watch] = WeakSet()
"""Those of this process."""


def check_all() -> None:
    """Raise if any peer was missing, for steps that run without the Python that checks: replays of graphs.

    Raises:
        MegalightError: it names the global ranks.
    """
    for watch in list(_WATCHES):
        try:
            watch.check()
        except MegalightError:
            # A new run in this process has watches of its own.
            _WATCHES.discard(watch)
            raise


class Watch:
    """Notes peers whose flags have not come in time.

    The kernel that waits writes the notes, and raises the missing peers' flags of kind ``FREE`` here, so that nothing
    that is queued behind it stays. What is computed from then on is worthless; :meth:`check` raises on the host.

    Args:
        memory: slots and flags.
        limit: seconds that a wait for a flag may take; None: as long as collectives of the group.
        also: further memory of the same ranks with as many slots, whose flags of kind ``FREE`` are raised as well,
            because one stream waits for those of all.

    Attributes:
        missing: ``[size]``: 1 for each peer that was missing, by its rank in the group; in host memory.
    """

    def __init__(self, memory: PeerMemory, limit: float | None = None, also: PeerMemory | None = None) -> None:
        self.memory, self.also = memory, also
        self.limit = limit_of(memory.group) if limit is None else limit
        # The kernel writes it where the host reads it, so the host waits for nothing.
        self.missing: Tensor = torch.zeros(memory.size, dtype=torch.int32, pin_memory=torch.cuda.is_available())
        self._notes = self.missing.numpy()  # the same memory; reading it is no operation of torch in the step
        _WATCHES.add(self)

    def check(self) -> None:
        """Raise if a peer was missing.

        Raises:
            MegalightError: it names the global ranks.
        """
        if not self._notes.any():
            return
        found = self._notes.nonzero()[0].tolist()
        ranks = dist.get_process_group_ranks(self.memory.group)
        names = ", ".join(str(ranks[place]) for place in found)
        raise MegalightError(
            f"rank {ranks[self.memory.rank]} waited {self.limit:g} s for data of rank {names}, in vain: that process "
            "has ended, or hangs. Look at its log for the first error. If it is only slow, raise the timeout of the "
            "process group (timeout_seconds of the strategy)."
        )

    def places(self, flags: tuple[int, ...], memory: PeerMemory) -> tuple[int, int, int, int]:
        """Return, for the peer of the first flag, the addresses of its note and of its FREE flags of the first slot.

        These are in the memory of the flags and in the other one, or twice the same. The last number is the distance of
        such a flag to that of the next slot, in words.
        """
        other = self.also if memory is self.memory else self.memory
        if other is None or not other.has_flags:
            other = memory
        own, others = (each.flag(each.rank, 0, Flag.FREE, 0) for each in (memory, other))
        column = (min(flags) - own) // 4 % memory.size
        return self.missing.data_ptr() + 4 * column, own + 4 * column, others + 4 * column, len(Flag) * memory.size


def limit_of(group: ProcessGroup) -> float:
    """Return how many seconds collectives of a group wait."""
    for kind in ("cuda", "cpu"):
        try:
            return float(group._get_backend(torch.device(kind)).options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue  # no backend for this device, or one that does not tell
    return DEFAULT_LIMIT
