"""How long a run takes to begin, and how far apart its ranks do."""

from __future__ import annotations

import os
import time
from pathlib import Path

IMPORTED = time.time()
"""When this module was imported."""


def program_start() -> float:
    """When this process was started, in seconds since the epoch (Linux, to 10 ms); elsewhere :data:`IMPORTED`."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = float(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the machine's start
        return time.time() - (float(Path("/proc/uptime").read_text().split()[0]) - ticks)
    except (OSError, ValueError, IndexError):
        return IMPORTED


def spans(stamps: list[dict[str, float]]) -> dict[str, float]:
    """Seconds between the stamps ``program``, ``entry``, ``fit``, ``train`` of all ranks, from first to last.

    ``ranks_apart_s``: between the first and the last process's start. ``program_s``: to imports and constructors done
    on the last rank; ``launch_s``: until it is in ``fit`` with its process group; ``setup_s``: until its model, data
    and optimizer are ready; ``all_s``: all of it.
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
