"""Several ranks under gloo for tests: one pool of processes that lives as long as the test session.

``run(fn, world_size, *args)`` calls the module-level function ``fn(*args)`` in ``world_size`` processes, each inside an
initialised default process group, and returns what the ranks returned, in rank order. A rank that raises fails the test
with its own traceback; a rank that hangs fails it after ``timeout`` seconds, and the pool is replaced.
"""

from __future__ import annotations

import atexit
import datetime
import multiprocessing as mp
import os
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _serve(rank: int, jobs: Any, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), LOCAL_RANK=str(rank))
    while (job := jobs.get()) is not None:
        fn, world_size, port, timeout, args = job
        os.environ.update(MASTER_PORT=str(port), WORLD_SIZE=str(world_size))
        try:
            torch.manual_seed(0)
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout),
            )
            results.put((rank, True, fn(*args)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class _Pool:
    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        self.results = context.Queue()
        self.jobs = [context.Queue() for _ in range(size)]
        self.processes = [
            context.Process(target=_serve, args=(rank, self.jobs[rank], self.results), daemon=True)
            for rank in range(size)
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


def run(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` gloo ranks; returns each rank's result (must be picklable; use CPU tensors
    sparingly, numbers and numpy arrays travel best)."""
    pool = _pool(world_size)
    port = free_port()
    for rank in range(world_size):
        pool.jobs[rank].put((fn, world_size, port, timeout, args))
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    try:
        while len(answers) + len(failures) < world_size:
            # once a rank has failed, its peers may hang in a collective: give them little time
            rank, good, value = pool.results.get(timeout=5 if failures else timeout)
            (answers if good else failures)[rank] = value
    except queue.Empty:
        missing = sorted(set(range(world_size)) - set(answers) - set(failures))
        _pools.remove(pool)
        pool.close()
        if not failures:
            raise TimeoutError(f"ranks {missing} of {world_size} did not finish {fn.__name__} in {timeout} s") from None
    if failures:
        rank, text = min(failures.items())
        raise AssertionError(f"rank {rank} of {world_size} failed in {fn.__name__}:\n{text}")
    return [answers[rank] for rank in range(world_size)]
