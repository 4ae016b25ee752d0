"""Keep the threads of a rank on one core.

Gloo's thread that waits for messages tries without a pause to lock a connection that another thread of the rank has
locked. Where that one waits for a core, this one spins on the next core for milliseconds. On a core that they share, it
does not run before the other one.
"""

from __future__ import annotations

import os

CORES = sorted(os.sched_getaffinity(0))
RANKS = 4
"""Ranks of most pools: several processes of tests begin at cores of their own, if there are so many."""


def stay(rank: int) -> None:
    """Run this thread, and what it starts from now on, on the core of a rank alone."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {CORES[(RANKS * process + rank) % len(CORES)]})


def roam() -> None:
    """Run this thread, and what it starts from now on, on any core."""
    os.sched_setaffinity(0, CORES)
