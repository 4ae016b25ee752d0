"""Process groups that only their members create, and the end of a process that belongs to one."""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from megalight.errors import ConfigurationError, LayoutError


def uses_backend(name: str, backend: str | None = None, group: ProcessGroup | None = None) -> bool:
    """Return whether a process group can send by a backend.

    Args:
        name: ``"nccl"`` or ``"gloo"``.
        backend: the group's backends, as torch writes them: ``nccl``, or ``cpu:gloo,cuda:nccl`` with one for each type
            of device. None: those of ``group``.
        group: None: the default group.
    """
    if backend is None:
        backend = dist.get_backend() if group is None else dist.get_backend(group)
    return name in (part.rpartition(":")[2] for part in str(backend).split(","))


def new_group(
    ranks: Sequence[int],
    purpose: str,
    backend: str | None = None,
    max_ctas: int | None = None,
    urgent: bool = False,
    timeout: timedelta | None = None,
) -> ProcessGroup:
    """Create a group of global ``ranks``. Only these ranks call this, all at the same time.

    torch names such a group by its ranks and by the number of groups in the process. Pipeline stages have different
    numbers of groups, so their names would differ and they would wait forever. Here the name contains the purpose.

    Args:
        ranks: the global ranks.
        purpose: what the group is for. Groups of the same ranks and purpose are numbered.
        backend: ``"gloo"`` for a group on the host. None: the backend of the default group.
        max_ctas: largest number of GPU SMs that a message occupies, also while it waits for the other side.
            None: NCCL's choice. Other backends ignore it; call :func:`check_max_ctas` for a value that a user gave.
        urgent: whether messages get SMs before computation that is also waiting for them.
        timeout: how long a rank may wait for the others. None: torch's, 30 minutes for gloo.

    Raises:
        LayoutError: torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise LayoutError(
            f"cannot create a group of {len(ranks)} ranks for {purpose}: torch.distributed is not initialized; "
            "call torch.distributed.init_process_group first."
        )
    options = None
    if (max_ctas is not None or urgent) and uses_backend("nccl", backend):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
        if max_ctas is not None:
            # NCCL's default minimum could be above our maximum.
            options.config.max_ctas, options.config.min_ctas = max_ctas, 1
    # `use_local_synchronization` lets only the members take part; then the name alone tells them which group is meant.
    with _named(f"{purpose} {' '.join(map(str, ranks))} {backend}"):
        group = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=True
        )
    assert isinstance(group, ProcessGroup)
    return group


def shared_group(
    ranks: Sequence[int], purpose: str = "the mesh", max_ctas: int | None = None, backend: str | None = None
) -> ProcessGroup:
    """Return the group of global ``ranks`` that all code with this purpose shares. The first call creates it.

    All members must ask for groups in the same order. Arguments and errors are those of :func:`new_group`.
    """
    # Kept by the default group: when that one is destroyed and made again, its groups are gone with it.
    known = _SHARED.setdefault(dist.group.WORLD, {}) if dist.is_initialized() else {}
    if (purpose, *ranks) not in known:
        known[purpose, *ranks] = new_group(ranks, purpose, backend, max_ctas)
    return known[purpose, *ranks]


_SHARED: WeakKeyDictionary[ProcessGroup | None, dict[tuple[str | int, ...], ProcessGroup]] = WeakKeyDictionary()
"""Default group -> purpose and ranks -> shared group. A new default group has new shared groups."""


def check_max_ctas(name: str, value: int | None, backend: str) -> None:
    """Check that a user's limit on SMs has an effect.

    Args:
        name: name of the option, for the message.
        value: the limit, or None.
        backend: backend of the default process group. Only NCCL's messages use SMs.

    Raises:
        ConfigurationError: ``value`` is set, and NCCL is not among the backends.
    """
    if value is not None and not uses_backend("nccl", backend):
        raise ConfigurationError(
            f"{name}={value} limits the SMs of NCCL's communication, but the backend here is {backend}. "
            "Remove it, or train on GPUs with the backend nccl."
        )


@contextmanager
def _named(wanted: str) -> Iterator[None]:
    """Name the next group by ``wanted`` and the number of groups that already have it."""
    # torch derives the name from a count of groups in this process. Only these private names let it be set.
    taken = set(c10d._world.pg_names.values())
    count = 0
    while (name := hashlib.sha256(f"{wanted} {count}".encode()).hexdigest()) in taken:
        count += 1
    original = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = original


FAILED = threading.Event()
"""Set after an error on this rank: there may be messages in flight that no other rank will ever answer."""

GRACE_SECONDS = 3.0
"""Time for the process group to close after an error.

It would wait for unanswered messages until its timeout, and all other ranks would wait for this one.
"""

SETTLE_SECONDS = 10.0
"""Time for gloo's threads to free the last tensors."""

THREADS = Path("/proc/self/task")


def end_at_exit() -> None:
    """Close process groups at exit, before the interpreter ends. Threads that outlive it abort the process."""
    atexit.unregister(_end)  # register only once
    atexit.register(_end)


def _end() -> None:
    if dist.is_initialized():
        if FAILED.is_set():
            # `destroy_process_group` may hang below. The thread ends the process from outside of it.
            threading.Thread(target=_give_up, daemon=True).start()
        dist.destroy_process_group()
    _settle()


def _give_up() -> None:
    time.sleep(GRACE_SECONDS)
    # `os._exit` flushes nothing, and the error is in these buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _settle() -> None:
    """Wait until gloo's threads sleep.

    A gloo thread frees its tensors after its work is done, and takes the interpreter's lock to do so. If the
    interpreter is ending, this aborts the process ("terminate called without an active exception"). The threads of a
    group that is still referenced are alive here.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    before, now = None, _gloo_threads()
    while now and time.monotonic() < deadline and (now != before or any(state != "S" for _, state, _ in now)):
        time.sleep(0.005)  # without the lock
        before, now = now, _gloo_threads()


def _gloo_threads() -> list[tuple[str, str, str]]:
    """Return id, state and number of sleeps of each gloo thread (only on Linux)."""
    threads = []
    for task in THREADS.glob("*"):
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:
            continue  # the thread has just ended
        facts = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if facts["Name"].startswith("pt_gloo"):
            threads.append((task.name, facts["State"][0], facts["voluntary_ctxt_switches"]))
    return sorted(threads)
