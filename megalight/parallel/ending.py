"""Ends a process that belongs to a process group: in time, and without an abort."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

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
