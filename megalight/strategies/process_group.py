"""The process group of all ranks."""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist

from megalight.parallel.ending import end_at_exit
from megalight.strategies.meeting import meet
from megalight.strategies.mesh_strategy import MeshStrategy


def backend_of(strategy: MeshStrategy) -> str:
    """Return the backend of the process group, or the backend with which it will be made."""
    if dist.is_initialized():
        return str(dist.get_backend())
    return strategy.process_group_backend or ("nccl" if strategy.root_device.type == "cuda" else "gloo")


def join(strategy: MeshStrategy, timeout_seconds: float) -> None:
    """Make the process group of all ranks, unless there is one already or only one process.

    Args:
        timeout_seconds: timeout of collectives in seconds, and of the wait for all processes.

    Raises:
        ConfigurationError: another program has the port.
        LayoutError: there are not as many processes in time.
    """
    if strategy.world_size == 1 or dist.is_initialized():
        return
    assert strategy.cluster_environment is not None
    address, port = strategy.cluster_environment.main_address, strategy.cluster_environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)  # not set for workers and SLURM tasks
    store = meet(strategy, address, port, timeout_seconds)
    dist.init_process_group(  # no device_id: with it, every rank must take part in making every group
        backend_of(strategy),
        init_method="env://",
        rank=strategy.global_rank,
        world_size=strategy.world_size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    del store  # the group has its own of the same server now
    # Threads of the group that outlive the interpreter would abort the process.
    end_at_exit()
