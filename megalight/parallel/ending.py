"""The end of a process that belongs to a process group: in time, and without an abort."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

FAILED = threading.Event()
"""Raised by an error on this rank: messages may be under way that no other rank will ever answer."""
GRACE_SECONDS = 3.0
"""How long the process group may then take to close. It would wait for such messages until its timeout, and all other
ranks for the end of this one."""
SETTLE_SECONDS = 10.0
"""How long gloo's threads may take to let go of the last tensors."""
THREADS = Path("/proc/self/task")


def end_at_exit() -> None:
    """Close the process groups before the interpreter goes: their threads must not outlive it, or the exit aborts."""
    atexit.unregister(_end)  # once, however many groups a process has had
    atexit.register(_end)


def _end() -> None:
    if dist.is_initialized():
        if FAILED.is_set():
            threading.Thread(target=_give_up, daemon=True).start()
        dist.destroy_process_group()
    _settle()


def _give_up() -> None:
    time.sleep(GRACE_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _settle() -> None:
    """Wait until gloo's threads sleep.

    A thread that has done its work lets go of the tensors afterwards, and takes the interpreter's lock for it. Where it
    asks for the lock of an interpreter that is ending, the process aborts ("terminate called without an active
    exception"). Whoever still holds a group keeps its threads alive here.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    before, now = None, _gloo_threads()
    while now and time.monotonic() < deadline and (now != before or any(state != "S" for _, state, _ in now)):
        time.sleep(0.005)  # without the lock
        before, now = now, _gloo_threads()


def _gloo_threads() -> list[tuple[str, str, str]]:
    """Of each worker thread its id, its state, and how often it went to sleep. Known on Linux only."""
    threads = []
    for task in THREADS.glob("*"):
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:
            continue  # it has just ended
        facts = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if facts["Name"].startswith("pt_gloo"):
            threads.append((task.name, facts["State"][0], facts["voluntary_ctxt_switches"]))
    return sorted(threads)
