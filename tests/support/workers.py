"""Several gloo ranks for tests: one pool of processes that lives as long as the test session.

``run(fn, world_size, *args)`` calls the module-level function ``fn(*args)`` in ``world_size`` processes with an
initialized default process group, and returns the results in rank order. The test fails if a rank raises (with the
rank's traceback), dies (with its exit code), or hangs for ``timeout`` seconds. If a process is lost or hangs, the next
job gets a new pool.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import importlib
import multiprocessing as mp
import os
import queue
import random
import re
import socket
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from tests.support.cores import roam, stay

GRACE = 5.0
"""Seconds for other ranks to end after one has failed. They may hang in a collective that it never joins."""
POLL = 0.2
PRELOAD = [
    *("torch", "lightning.pytorch", "megalight.models.gpt", "megalight.strategies", "tests.support.installed"),
    # What a command imports besides.
    *("megalight.cli.lightning", "megalight.callbacks", "omegaconf", "torch.utils.tensorboard"),
    # Lightning's ModelCheckpoint imports it to ask whether a folder is in a store: half a second.
    "s3fs",
    # Four seconds in each rank that quantizes, and so many objects that each full collection of garbage takes long.
    "tests.support.quantizing",
    "tests.support.frozen",
]
"""What almost all ranks and commands need, which takes seconds to import."""
SERVER = mp.get_context("forkserver")
"""Processes are forked from one that has imported all this."""
SERVER.set_forkserver_preload(PRELOAD)


class Forked(SERVER.Process):  # type: ignore[name-defined, misc]
    """A process that is forked from it, and starts its own as any other does.

    One of Python's would start a server of its own for the readers of data, which makes all these imports again.
    """

    _start_method = None


LOST_PEER = re.compile(r"by peer|Broken pipe")
"""Matches errors of ranks that lost another rank. These are consequences of a failure, not its cause."""


class NotMet(Exception):
    """The ranks of a job did not find each other, so its function did not run."""


def meeting() -> str:
    """Return the address of a new file at which processes can meet (``init_method``); the last of them deletes it.

    A port that is free now may be another test's when the first process wants it.
    """
    return f"file://{tempfile.gettempdir()}/meeting-{uuid.uuid4().hex}"


def free_port() -> int:
    """Return a free TCP port, for programs that can meet at nothing else (SLURM's tasks).

    It is below those from which the system chooses, so that only another call of this may take it before it is used.
    """
    for port in random.Random(os.urandom(8)).sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("none of 100 ports from 20000 to 31999 is free")


def _answer(rank: int, job: bytes) -> bytes:
    """Run one job. The result is pickled here and not in the queue's thread, so that pickling errors are reported."""
    import torch
    import torch.distributed as dist

    fn, world_size, port, timeout, args = ForkingPickler.loads(job)
    os.environ.update(MASTER_PORT=str(port), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)  # an earlier Trainer may have set more; different numbers on ranks round differently
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    if world_size > 1:
        stay(rank)
    else:
        roam()
    try:
        patience = datetime.timedelta(seconds=timeout)
        try:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)
        except Exception as error:
            raise NotMet from error
        return bytes(ForkingPickler.dumps(fn(*args)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _serve(rank: int, jobs: Any, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), LOCAL_RANK=str(rank))
    rank_zero_only.rank = rank  # Lightning reads the variable when it is imported, which was before
    stay(rank)  # also the thread that waits for messages, which starts now
    importlib.import_module("tests.support.one_loop")  # here, as threads do not survive a fork
    tests = mp.parent_process()  # not the server that forks ranks, which does not end as long as they live
    while True:
        try:
            job = jobs.get(timeout=10)
        except queue.Empty:
            if tests is not None and not tests.is_alive():  # they were killed
                return
            continue
        if job is None:
            return
        failed = False
        try:
            results.put((rank, True, _answer(rank, job)))
        except BaseException:
            failed = True
            results.put((rank, False, traceback.format_exc()))
        if failed:
            gc.collect()  # closes connections that the traceback kept open, so peers need not wait for their timeout


class _Pool:
    def __init__(self, size: int) -> None:
        self.results = SERVER.Queue()
        self.jobs = [SERVER.Queue() for _ in range(size)]
        self.processes = [
            Forked(target=_serve, args=(rank, self.jobs[rank], self.results), daemon=True) for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


_pools: list[_Pool] = []


def _pool(world_size: int) -> _Pool:
    if _pools and len(_pools[0].processes) < world_size:
        _pools.pop().close()
    if not _pools:
        _pools.append(_Pool(max(world_size, 4)))
    return _pools[0]


@atexit.register
def _close() -> None:
    while _pools:
        _pools.pop().close()


def _store() -> Any:
    """Make the store for the rendezvous of a job's ranks, on a port that the system chooses."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _collect(pool: _Pool, world_size: int, timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Return answers and failures by rank, each in order of arrival."""
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    while len(answers) + len(failures) < world_size and time.monotonic() < deadline:
        try:
            rank, good, value = pool.results.get(timeout=POLL)
        except queue.Empty:
            for rank, process in enumerate(pool.processes[:world_size]):
                if not process.is_alive() and rank not in answers and rank not in failures:
                    failures[rank] = f"the process died with exit code {process.exitcode}"
                    deadline = min(deadline, time.monotonic() + GRACE)
            continue
        if good:
            answers[rank] = ForkingPickler.loads(value)
        else:
            failures[rank] = value
            deadline = min(deadline, time.monotonic() + GRACE)
    return answers, failures


def _try(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float
) -> tuple[dict[int, Any], dict[int, str], list[int]]:
    """Run a job, and return answers and failures by rank, and the ranks that gave none. A broken pool is closed."""
    pool = _pool(world_size)
    store = _store()
    job = bytes(ForkingPickler.dumps((fn, world_size, store.port, timeout, args)))
    for rank in range(world_size):
        pool.jobs[rank].put(job)
    answers, failures = _collect(pool, world_size, timeout)
    del store  # only now: ranks may have needed it to connect until all of them had answered
    missing = sorted(set(range(world_size)) - set(answers) - set(failures))
    # Ranks that did not meet count their groups differently from now on, and would never meet again.
    lost = any(NotMet.__name__ in text for text in failures.values())
    if missing or lost or not all(process.is_alive() for process in pool.processes):
        _pools.remove(pool)
        pool.close()
    return answers, failures, missing


def run(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` gloo ranks, and return each rank's result.

    Results must be picklable. Prefer numbers and numpy arrays to CPU tensors.
    """
    for again in (True, True, False):
        answers, failures, missing = _try(fn, world_size, args, timeout)
        # Gloo listens at ports that the system chooses. A process of another test that looks for a peer at the same
        # port breaks the connection: nothing that this test is about.
        if not (again and any(NotMet.__name__ in text for text in failures.values())):
            break
    if failures:
        rank, text = min(failures.items(), key=lambda failure: LOST_PEER.search(failure[1]) is not None)
        raise AssertionError(f"rank {rank} of {world_size} failed in {fn.__name__}:\n{text}")
    if missing:
        raise TimeoutError(f"ranks {missing} of {world_size} did not finish {fn.__name__} in {timeout} s")
    return [answers[rank] for rank in range(world_size)]
