"""Jobs over NCCL: one after another in processes of their own, one per GPU, each told of when it is done."""

from __future__ import annotations

import datetime
import functools
import os
import queue
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.workers import free_port

PATIENCE = 90.0
"""Seconds for one job."""

Job = Callable[..., Any]
"""A module-level function; its arguments must be told apart by ``repr``."""


class Runs:
    """The jobs of one world size, begun at once.

    Args:
        jobs: functions and their arguments.
    """

    def __init__(self, world: int, jobs: Sequence[tuple[Job, tuple[Any, ...]]]) -> None:
        context = mp.get_context("spawn")
        self.results = context.Queue()
        self.found: dict[str, Any] = {}
        self.broken: str | None = None
        port = free_port()
        self.workers = [
            context.Process(target=_rank, args=(rank, world, port, jobs, self.results), daemon=True)
            for rank in range(world)
        ]
        for worker in self.workers:
            worker.start()

    def outcome(self, arguments: tuple[Any, ...]) -> Any:
        """What the first rank returned. After the first error nothing more comes.

        Raises:
            AssertionError: a rank failed in this job or in one before, or nothing came in time.
        """
        wanted, last = repr(arguments), time.monotonic()
        while wanted not in self.found and self.broken is None:
            try:
                rank, name, found, error = self.results.get(timeout=1)
            except queue.Empty:
                if time.monotonic() > last + PATIENCE or not any(worker.is_alive() for worker in self.workers):
                    self.broken = f"nothing came of {wanted} or a job before it in {time.monotonic() - last:.0f} s"
                continue
            last = time.monotonic()
            if error is None:
                self.found[name] = found
            else:
                self.broken = f"rank {rank} in {name}: {error}"
        if wanted not in self.found:
            for worker in self.workers:
                worker.kill()
            raise AssertionError(self.broken)
        return self.found[wanted]


@functools.cache
def runs_of(jobs: Callable[[int], Sequence[tuple[Job, tuple[Any, ...]]]], world: int) -> Runs:
    """All jobs of a file that take so many GPUs; skips the test where there are fewer."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    return Runs(world, jobs(world))


def _rank(rank: int, world: int, port: int, jobs: Sequence[tuple[Job, tuple[Any, ...]]], results: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    patience = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group("nccl", rank=rank, world_size=world, timeout=patience)
    for job, arguments in jobs:
        try:
            found = job(*arguments)
        except Exception:
            results.put((rank, repr(arguments), None, traceback.format_exc()))
            raise
        dist.barrier()  # of a job all ranks are through
        if rank == 0:
            results.put((rank, repr(arguments), found, None))
    dist.destroy_process_group()
