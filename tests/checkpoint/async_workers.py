"""Helpers for asynchronous saves: workers with faults, and processes that must be gone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAULTS = Path(__file__).with_name("faulty_worker")


@contextmanager
def fault(what: str) -> Iterator[None]:
    """Workers that start in here have a fault; see ``faulty_worker/sitecustomize.py``."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "WORKER_FAULT")}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FAULTS), before["PYTHONPATH"] or ""])
    os.environ["WORKER_FAULT"] = what
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def workers_of(parent: int) -> list[int]:
    """The ids of a process' living workers."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if (
            any(b"megalight.checkpoint.async_save.worker" in part for part in command)
            and command[-2] == str(parent).encode()
            and state != "Z"
        ):
            found.append(int(entry.name))
    return found


def wait_until_gone(parent: int) -> None:
    """Wait until a process has no workers, also if it is dead."""
    deadline = time.monotonic() + 60
    while workers_of(parent):
        assert time.monotonic() < deadline, f"workers {workers_of(parent)} of {parent} have outlived it"
        time.sleep(0.02)
