"""The time that a run needs to start."""

from __future__ import annotations

import os
import time
from pathlib import Path

IMPORTED = time.time()
"""When this module was imported."""


def program_start() -> float:
    """Return the start of this process in seconds since the epoch (to 10 ms). Not on Linux: :data:`IMPORTED`."""
    try:
        # After the name of the program, which is in brackets and may contain blanks.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = float(fields[19]) / os.sysconf("SC_CLK_TCK")  # seconds since the machine was started
        return time.time() - (float(Path("/proc/uptime").read_text().split()[0]) - ticks)
    except (OSError, ValueError, IndexError):
        return IMPORTED


def spans(stamps: list[dict[str, float]]) -> dict[str, float]:
    """Return the durations between the time stamps ``program``, ``entry``, ``fit`` and ``train`` of all ranks.

    - ``ranks_apart_s``: from the start of the first process to the start of the last.
    - ``program_s``: until imports and constructors are done on the last rank.
    - ``launch_s``: then until the last rank is in ``fit`` with its process group.
    - ``setup_s``: then until model, data and optimizer are ready on the last rank.
    - ``all_s``: the whole time.
    """
    first = min(stamp["program"] for stamp in stamps)
    last = {name: max(stamp[name] for stamp in stamps) for name in ("program", "entry", "fit", "train")}
    return {
        "ranks_apart_s": last["program"] - first,
        "program_s": last["entry"] - first,
        "launch_s": last["fit"] - last["entry"],
        "setup_s": last["train"] - last["fit"],
        "all_s": last["train"] - first,
    }
