"""Whole runs whose disk fails at a random write: all ranks are told, nothing is lost, and the run resumes exactly."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megalight import checkpoint
from megalight.checkpoint.async_save.saves import KINDS
from megalight.errors import CheckpointError
from tests.checkpoint.async_workers import fault
from tests.strategies.test_async_saves import STEPS, fit
from tests.support.workers import run

ERRORS = (errno.ENOSPC, errno.EIO)


@contextmanager
def failing(kind: str | None, number: int, at: int) -> Iterator[None]:
    """Let the ``at``-th write into checkpoints fail: in this process, or in the worker that it starts."""
    if kind is not None:
        with fault(f"error:{number}:{at}"):
            yield
        return
    write, count = os.write, 0

    def faulty(descriptor: int, data: Any) -> int:
        nonlocal count
        inside = ".partial-" in os.readlink(f"/proc/self/fd/{descriptor}")
        count += inside
        if inside and count == at:
            raise OSError(number, os.strerror(number))
        return write(descriptor, data)

    os.write = faulty
    try:
        yield
    finally:
        os.write = write


def _runs(folder: str, seed: int, count: int) -> list[bool]:
    """Return whether each of the runs was told of its failure."""
    draw, told = random.Random(seed), []
    whole = fit(f"{folder}/whole", kind=None)
    for run_number in range(count):
        where = f"{folder}/{run_number}"
        kind, number, rank, at = draw.choice((None, *KINDS)), draw.choice(ERRORS), draw.randrange(2), draw.randint(1, 6)
        message = ""
        try:
            if rank == dist.get_rank():
                with failing(kind, number, at):
                    fit(where, kind=kind)
            else:
                fit(where, kind=kind)
        except CheckpointError as error:
            message = str(error)
        assert not message or os.strerror(number) in message
        told.append(bool(message))
        dist.barrier()
        done = checkpoint.finished(where)
        steps = [checkpoint.open(path).common["global_step"] for path in done]
        # Saves are published in order, up to the one that failed.
        assert set(range(1, max(steps, default=0) + 1)) == set(steps)
        assert bool(message) == (max(steps, default=0) < STEPS)
        dist.barrier()
        again = fit(where, kind=None, resume=str(done[-1]) if done else None)
        assert again == whole[max(steps, default=0) :]
        assert not [name for name in os.listdir(where) if ".partial-" in name]
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(where)
    return told


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("seed", "count"), [(0, 1), *(pytest.param(seed, 10, marks=pytest.mark.full) for seed in range(1, 11))]
)
def test_a_run_resumes_after_its_disk_failed(seed: int, count: int, tmp_path: Path) -> None:
    """In the full run 10 seeds of 10 runs each."""
    one, other = run(_runs, 2, str(tmp_path), seed, count, timeout=1000)
    assert one == other
    assert any(one)
