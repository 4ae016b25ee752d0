"""The process group of all ranks, which first meet at rank 0: who waits says for what."""

from __future__ import annotations

import datetime
import errno
import logging
import os
import socket
import time

import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment

from megalight.errors import ConfigurationError, LayoutError
from megalight.parallel.mesh import end_at_exit
from megalight.strategies.mesh_strategy import MeshStrategy

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long a process waits for others until it says so. It says so again after twice the time.

On a slow machine, processes that start together need half a minute to import torch.
"""


def check_address(strategy: MeshStrategy) -> None:
    """Refuse an address at which the processes of a run cannot meet, before this process starts the others.

    Raises:
        ConfigurationError: MASTER_PORT is no port, is in use, or is not set although there are several machines.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    alone = strategy.num_nodes * strategy.num_processes == 1
    if alone or environment.creates_processes_externally or dist.is_initialized():
        return
    given = os.environ.get("MASTER_PORT")
    if given is not None and not (given.isdigit() and 0 < int(given) < 2**16):
        raise ConfigurationError(f"MASTER_PORT={given} is no port; set a number from 1 to 65535, or leave it out.")
    if strategy.num_nodes > 1 and given is None and isinstance(environment, LightningEnvironment):
        raise ConfigurationError(
            f"num_nodes={strategy.num_nodes}, and MASTER_PORT is not set: {_several(strategy, 'PORT')} For a single "
            "machine, leave num_nodes out."
        )
    if given is not None and strategy.node_rank == 0:
        try:
            socket.create_server(("", int(given))).close()
        except OSError as error:
            raise _unusable(int(given), error.errno) from error


def meet(strategy: MeshStrategy, address: str, port: int, timeout_seconds: float) -> dist.Store:
    """Wait until all processes are here.

    Args:
        address: where rank 0 is.
        timeout_seconds: how long to wait.

    Returns:
        what to keep until the process group is made: on rank 0 it serves the others.

    Raises:
        ConfigurationError: another program has the port.
        LayoutError: there are not as many processes in time.
    """
    began, tell_after, pause = time.monotonic(), PATIENCE_SECONDS, 0.005
    store: dist.TCPStore | None = None
    found = 0
    while found < strategy.world_size:
        if store is None:
            store, found = _arrive(strategy, address, port)
        else:
            # Not a wait inside torch, which an interrupt would not end.
            time.sleep(pause := min(2 * pause, 0.5))
            found = store.add("here", 0)
        waited = time.monotonic() - began
        if found < strategy.world_size and waited >= min(tell_after, timeout_seconds):
            text = _missing(strategy, f"{address}:{port}", found, waited)
            if waited >= timeout_seconds:
                raise LayoutError(text)
            if strategy.global_rank == 0 or (store is None and strategy.local_rank == 0):
                log.warning(text)
            tell_after *= 2
    assert store is not None
    return store


def _arrive(strategy: MeshStrategy, address: str, port: int) -> tuple[dist.TCPStore | None, int]:
    """Return the store, and how many processes have come to it; None and 0 while rank 0 does not answer."""
    # torchrun's agent has one already. Otherwise torch makes one on rank 0, and this is the same.
    serves = strategy.global_rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    if not serves:
        try:  # torch would wait, and then write traces of C++
            socket.create_connection((address, port), timeout=1.0).close()
        except OSError:
            time.sleep(0.05)
            return None, 0
    timeout = datetime.timedelta(seconds=PATIENCE_SECONDS)
    try:
        store = dist.TCPStore(
            address, port, strategy.world_size, serves, timeout, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise _unusable(port, errno.EADDRINUSE) from error
        raise
    return store, store.add("here", 1)


def _missing(strategy: MeshStrategy, place: str, found: int, waited: float) -> str:
    here = f"{found} of {strategy.world_size} processes are here" if found else f"no rank 0 answers at {place}"
    asked = f"Trainer(devices={strategy.num_processes}, num_nodes={strategy.num_nodes})"
    text = f"{here} after {waited:.0f} seconds, and {asked} waits for all {strategy.world_size} of them. "
    if strategy.num_nodes > 1 and isinstance(strategy.cluster_environment, LightningEnvironment):
        return text + _several(strategy, place.rpartition(":")[2])
    return text + "Look for an error of another rank above, or in its own output."


def _several(strategy: MeshStrategy, port: str) -> str:
    last = strategy.num_nodes - 1
    return (
        f"Start the same command on each of the {strategy.num_nodes} machines with MASTER_ADDR=ADDRESS of the first, "
        f"MASTER_PORT={port} and NODE_RANK=0 to {last} (it is {strategy.node_rank} here), or let torchrun or SLURM "
        "start it (megalight launch writes the script)."
    )


def _unusable(port: int, code: int | None) -> ConfigurationError:
    reason = "is in use on this machine" if code == errno.EADDRINUSE else f"cannot be used: {os.strerror(code or 0)}"
    return ConfigurationError(
        f"MASTER_PORT={port} {reason}, and the processes of this run meet there. Set it to a free port, or, on a "
        "single machine, leave it out."
    )


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
