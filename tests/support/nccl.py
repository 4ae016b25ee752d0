"""Jobs with NCCL: one process per GPU runs all jobs one after another, and reports each result at once."""

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

from tests.support.workers import meeting

PATIENCE = 240.0
"""Maximum seconds for one job. On a new machine its kernels are compiled first, beside those of other tests."""

Job = Callable[..., Any]
"""A module-level function. Different arguments must have a different ``repr``."""


class Runs:
    """The jobs of one world size. The constructor starts them.

    Args:
        jobs: functions and their arguments.
    """

    def __init__(self, world: int, jobs: Sequence[tuple[Job, tuple[Any, ...]]]) -> None:
        context = mp.get_context("spawn")
        self.results = context.Queue()
        self.found: dict[str, Any] = {}
        self.broken: str | None = None
        place = meeting()
        self.workers = [
            context.Process(target=_rank, args=(rank, world, place, jobs, self.results), daemon=True)
            for rank in range(world)
        ]
        for worker in self.workers:
            worker.start()

    def outcome(self, arguments: tuple[Any, ...]) -> Any:
        """Return the first rank's result of a job. After the first error there are no more results.

        Raises:
            AssertionError: a rank failed in this job or an earlier one, or there was no result in time.
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
    """Start all jobs of a file for ``world`` GPUs. Skip the test if there are fewer GPUs."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    return Runs(world, jobs(world))


def _rank(rank: int, world: int, place: str, jobs: Sequence[tuple[Job, tuple[Any, ...]]], results: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    # Hosts of GPUs may be shared, and there are few multicast groups for all who use them.
    os.environ.update(NCCL_NVLS_ENABLE="0")
    torch.cuda.set_device(rank)
    patience = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group("nccl", place, rank=rank, world_size=world, timeout=patience)
    for job, arguments in jobs:
        try:
            found = job(*arguments)
        except Exception:
            results.put((rank, repr(arguments), None, traceback.format_exc()))
            raise
        dist.barrier()  # all ranks have finished the job before rank 0 reports it
        if rank == 0:
            results.put((rank, repr(arguments), found, None))
    dist.destroy_process_group()
