"""Ends the ranks that rank 0 has started when rank 0 is killed.

A killed rank 0 cannot end its children. On GPUs they would wait for ever: an NCCL collective without rank 0 never ends,
and the store that its watchdog asks has gone with rank 0.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

STARTED_BY = "MEGALIGHT_STARTED_BY"
"""Set for child processes: the id of rank 0's process, a colon, and the path of the mark."""

PERIOD_SECONDS = 0.5
"""Time between two looks at the parent."""

GRACE_SECONDS = 3.0
"""Time for an orphan to end by itself and to show its own error."""


def announce() -> None:
    """On rank 0, before it starts children: leave a mark that is removed at a normal exit and stays after a kill."""
    if STARTED_BY in os.environ and os.environ[STARTED_BY].startswith(f"{os.getpid()}:"):
        return
    handle, path = tempfile.mkstemp(prefix="megalight-rank0-")
    os.close(handle)
    os.environ[STARTED_BY] = f"{os.getpid()}:{path}"
    atexit.register(Path(path).unlink, missing_ok=True)


def watch() -> None:
    """On a child of rank 0: end this process soon after rank 0 was killed. Other processes are not watched."""
    parent, _, mark = os.environ.get(STARTED_BY, "").partition(":")
    if parent == str(os.getppid()) and not any(thread.name == STARTED_BY for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=(int(parent), Path(mark)), name=STARTED_BY, daemon=True).start()


def _watch(parent: int, mark: Path) -> None:
    # A process whose parent dies gets another parent.
    while os.getppid() == parent:
        time.sleep(PERIOD_SECONDS)
    if not mark.exists():
        return  # rank 0 ended by itself, with or without an error; its launcher ends the others where needed
    time.sleep(GRACE_SECONDS)
    with suppress(OSError):
        mark.unlink()
    with suppress(OSError):
        sys.stderr.write(f"Rank 0 (process {parent}) was killed; process {os.getpid()}, which it started, ends too.\n")
        sys.stderr.flush()
    os._exit(1)
