"""Waits for peers by kernels of one warp, with a limit, and copies between them.

A rank whose peer is gone names it, and stops waiting. :class:`PeerCopyStream` copies to peers and raises their flags.

A kernel needs a place on an SM, which a GEMM may occupy. So they run on the stream of the GEMMs, between them. A wait
sees a flag one or two microseconds after a peer has raised it.
"""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import MegalightError
from megalight.ops.jit import Value, constexpr, tl, triton
from megalight.parallel.peers import driver
from megalight.parallel.peers.memory import Flag, PeerMemory, PeerSlot
from megalight.parallel.trace import capturing

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


WIDEST = 32
"""Largest number of flags in a row."""
AT_ONCE = 7
"""Largest number of flags that one kernel raises: one for each peer in a host of eight GPUs."""


def wait(flags: tuple[int, ...]) -> None:
    """Let the current stream wait until every flag is raised, then lower the flags.

    Args:
        flags: addresses on this device, at most :data:`WIDEST` words apart.
    """
    if flags:
        _wait[(1,)](*_row(flags), WIDTH=WIDEST, num_warps=1)


def wait_with(watch: Watch, flags: tuple[int, ...], memory: PeerMemory | None = None) -> None:
    """Do as :func:`wait`, but no longer than the watch allows: then note the peers, and let what is queued go on.

    Args:
        memory: the memory of the flags; None: the first one of the watch.
    """
    if flags:
        memory = memory or watch.memory
        places = watch.places(flags, memory)
        limit = int(watch.limit * 1e9)
        _wait_with[(1,)](*_row(flags), *places, limit, WIDTH=WIDEST, SLOTS=memory.slots, num_warps=1)


def raise_flags(flags: tuple[int, ...]) -> None:
    """Raise flags after the work that the current stream has been given so far.

    Args:
        flags: addresses on this device or on peers.
    """
    for first in range(0, len(flags), AT_ONCE):
        some = flags[first : first + AT_ONCE]
        _raise[(1,)](*some, *some[:1] * (AT_ONCE - len(some)), COUNT=len(some), num_warps=1)


@lru_cache
def prepare(count: int) -> None:
    """Load the kernel that raises so many flags, once: a CUDA graph can record it, but not load it."""
    words = torch.zeros(count, dtype=torch.int32, device="cuda")
    raise_flags(tuple(words.data_ptr() + 4 * place for place in range(count)))


@lru_cache(maxsize=4096)
def _row(flags: tuple[int, ...]) -> tuple[int, int]:
    """Return the first address, and a bit mask of the words after it that are flags."""
    first = min(flags)
    # The flags of one kind lie side by side, one for each rank of the host, so they fit one row.
    return first, sum(1 << (flag - first) // 4 for flag in flags)


@triton.jit  # type: ignore[untyped-decorator]
def _words(address: Value) -> Value:
    # Triton passes an address below 2^31 in 32 bits. Pinned memory may lie there, where torch takes it from the heap.
    return address.to(tl.int64).to(tl.pointer_type(tl.int32))


# Not specialized: addresses and masks differ from call to call, and each would be compiled again.
@triton.jit(do_not_specialize=["first", "which"])  # type: ignore[untyped-decorator]
def _wait(first: Value, which: Value, WIDTH: constexpr) -> None:
    row = _words(first)
    for word in range(WIDTH):
        if (which >> word) & 1:
            # Acquire at system scope: data that the peer wrote before the flag is visible after it.
            while tl.atomic_cas(row + word, 1, 0, sem="acquire", scope="sys") == 0:
                pass


@triton.jit(do_not_specialize=["a", "b", "c", "d", "e", "f", "g"])  # type: ignore[untyped-decorator]
def _raise(a: Value, b: Value, c: Value, d: Value, e: Value, f: Value, g: Value, COUNT: constexpr) -> None:
    _up(a)
    if COUNT > 1:
        _up(b)
    if COUNT > 2:
        _up(c)
    if COUNT > 3:
        _up(d)
    if COUNT > 4:
        _up(e)
    if COUNT > 5:
        _up(f)
    if COUNT > 6:
        _up(g)


@triton.jit  # type: ignore[untyped-decorator]
def _up(flag: Value) -> None:
    # Release at system scope: a peer that sees it sees that all reads before are over.
    tl.atomic_xchg(_words(flag), 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["first", "which", "notes", "free", "others", "stride", "limit"])  # type: ignore[untyped-decorator]
def _wait_with(
    first: Value, which: Value, notes: Value, free: Value, others: Value, stride: Value, limit: Value,
    WIDTH: constexpr, SLOTS: constexpr,
) -> None:  # fmt: skip
    row, noted, unlocked, beside = _words(first), _words(notes), _words(free), _words(others)
    began = _now()
    for word in range(WIDTH):
        if (which >> word) & 1:
            seen = tl.atomic_cas(row + word, 1, 0, sem="acquire", scope="sys")
            if seen == 0:
                # Once a peer was missing, no later wait is for it: whole steps may be queued.
                gone = tl.load(noted + word, volatile=True)
                while seen == 0:
                    if (gone != 0) | (_now() - began > limit):
                        tl.store(noted + word, 1)
                        for place in range(SLOTS):
                            tl.store(unlocked + place * stride + word, 1)
                            tl.store(beside + place * stride + word, 1)
                        seen += 2
                    else:
                        seen = tl.atomic_cas(row + word, 1, 0, sem="acquire", scope="sys")


@triton.jit  # type: ignore[untyped-decorator]
def _now() -> Value:
    """Nanoseconds of the device's clock."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


class PeerCopyStream:
    """A stream for copies, and the flags around them."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def push(self, slot: PeerSlot, to: int, *pairs: tuple[Tensor, Tensor]) -> None:
        """Copy each second tensor to the first, a place in the slot of rank ``to``, and raise its flag."""
        for place, source in pairs:
            driver.copy(self.stream, place, source)
        # Stream order makes the flag visible only after the data.
        driver.raise_flags(self.stream, slot.flags_at(Flag.READY, (to,)))

    def await_free(self, slot: PeerSlot) -> None:
        """Wait, before the first push, until all peers have read the previous contents of their slots."""
        driver.wait(self.stream, slot.flags(Flag.FREE, slot.memory.others))

    def free(self, slot: PeerSlot) -> None:
        """Let peers write into a slot of this rank, after the work that the current stream has queued."""
        current = torch.cuda.current_stream()
        flags = slot.flags_at(Flag.FREE, slot.memory.others)
        if capturing():  # a capture must not end with work left on another stream
            # By a kernel: the longest idle times of recorded steps lay behind flags that the front end raised here.
            raise_flags(flags)
            return
        prepare(len(flags))
        # After what the stream of products has queued so far, which still reads the slot.
        self.stream.wait_stream(current)
        driver.raise_flags(self.stream, flags)
