"""Processes that end while gloo's threads still hold tensors: ``python -m tests.parallel.exits COUNT``.

The threads share one CPU with the main thread and run only where it does not, so that they let go as late as can be.
Exits with the number of processes that did not end well.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megalight.parallel import mesh
from tests.support.workers import meeting

KEPT: list[object] = []


def late(place: str) -> None:
    """Begin collectives that nobody waits for, and end."""
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    KEPT.append(dist.group.WORLD)
    mesh.end_at_exit()
    cpu = min(os.sched_getaffinity(0))
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), {cpu})
        if (task / "comm").read_text().startswith("pt_gloo"):
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
    for _ in range(64):
        dist.all_reduce(torch.ones(3), async_op=True)


def main(count: int) -> None:
    torch.set_num_threads(1)
    failed = 0
    for _ in range(count):
        child = os.fork()
        if not child:
            late(meeting())
            return
        failed += os.waitpid(child, 0)[1] != 0
    sys.exit(failed)


if __name__ == "__main__":
    main(int(sys.argv[1]))
