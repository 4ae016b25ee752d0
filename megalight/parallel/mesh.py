"""The mesh of ranks: one frozen object with named axes, built once and passed by argument.

Rank order is Megatron's, fastest first: ``tp, cp, dp, pp``. Experts see the same ranks as ``etp, ep, edp, pp``
(parallel folding). "Axis" is a word for meshes; tensors have "dims".

An axis can be divided into two: ``"tp%2"`` is the place within runs of 2 neighboring ranks of ``tp``, and ``"tp/2"``
is the number of the run (both as in integer arithmetic on coordinates). With 2 KV heads and ``tp = 4``, ``"tp/2"``
counts KV heads and ``"tp%2"`` their replicas. ``"pp:0+3"`` means only the ranks at places 0 and 3 of ``pp``: for
example the stages that share a tied weight.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, reduce
from math import prod
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from megalight.errors import ConfigurationError, LayoutError, nearest
from megalight.parallel.degrees import check_world_size


def uses_backend(name: str, backend: str | None = None, group: ProcessGroup | None = None) -> bool:
    """Return whether a process group can send by a backend.

    Args:
        name: ``"nccl"`` or ``"gloo"``.
        backend: the group's backends, as torch writes them: ``nccl``, or ``cpu:gloo,cuda:nccl`` with one for each type
            of device. None: those of ``group``.
        group: None: the default group.
    """
    if backend is None:
        backend = dist.get_backend() if group is None else dist.get_backend(group)
    return name in (part.rpartition(":")[2] for part in str(backend).split(","))


def new_group(
    ranks: Sequence[int],
    purpose: str,
    backend: str | None = None,
    max_ctas: int | None = None,
    urgent: bool = False,
    timeout: timedelta | None = None,
) -> ProcessGroup:
    """Create a group of global ``ranks``. Only these ranks call this, all at the same time.

    torch names such a group by its ranks and by the number of groups in the process. Pipeline stages have different
    numbers of groups, so their names would differ and they would wait forever. Here the name contains the purpose.

    Args:
        ranks: the global ranks.
        purpose: what the group is for. Groups of the same ranks and purpose are numbered.
        backend: ``"gloo"`` for a group on the host. None: the backend of the default group.
        max_ctas: largest number of GPU SMs that a message occupies, also while it waits for the other side.
            None: NCCL's choice. Other backends ignore it; call :func:`check_max_ctas` for a value that a user gave.
        urgent: whether messages get SMs before computation that is also waiting for them.
        timeout: how long a rank may wait for the others. None: torch's, 30 minutes for gloo.

    Raises:
        LayoutError: torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise LayoutError(
            f"cannot create a group of {len(ranks)} ranks for {purpose}: torch.distributed is not initialized; "
            "call torch.distributed.init_process_group first."
        )
    options = None
    if (max_ctas is not None or urgent) and uses_backend("nccl", backend):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
        if max_ctas is not None:
            # NCCL's default minimum could be above our maximum.
            options.config.max_ctas, options.config.min_ctas = max_ctas, 1
    # `use_local_synchronization` lets only the members take part; then the name alone tells them which group is meant.
    with _named(f"{purpose} {' '.join(map(str, ranks))} {backend}"):
        group = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=True
        )
    assert isinstance(group, ProcessGroup)
    return group


def shared_group(
    ranks: Sequence[int], purpose: str = "the mesh", max_ctas: int | None = None, backend: str | None = None
) -> ProcessGroup:
    """Return the group of global ``ranks`` that all code with this purpose shares. The first call creates it.

    All members must ask for groups in the same order. Arguments and errors are those of :func:`new_group`.
    """
    # Kept by the default group: when that one is destroyed and made again, its groups are gone with it.
    known = _SHARED.setdefault(dist.group.WORLD, {}) if dist.is_initialized() else {}
    if (purpose, *ranks) not in known:
        known[purpose, *ranks] = new_group(ranks, purpose, backend, max_ctas)
    return known[purpose, *ranks]


_SHARED: WeakKeyDictionary[ProcessGroup | None, dict[tuple[str | int, ...], ProcessGroup]] = WeakKeyDictionary()
"""Default group -> purpose and ranks -> shared group. A new default group has new shared groups."""


def check_max_ctas(name: str, value: int | None, backend: str) -> None:
    """Check that a user's limit on SMs has an effect.

    Args:
        name: name of the option, for the message.
        value: the limit, or None.
        backend: backend of the default process group. Only NCCL's messages use SMs.

    Raises:
        ConfigurationError: ``value`` is set, and NCCL is not among the backends.
    """
    if value is not None and not uses_backend("nccl", backend):
        raise ConfigurationError(
            f"{name}={value} limits the SMs of NCCL's communication, but the backend here is {backend}. "
            "Remove it, or train on GPUs with the backend nccl."
        )


@contextmanager
def _named(wanted: str) -> Iterator[None]:
    """Name the next group by ``wanted`` and the number of groups that already have it."""
    # torch derives the name from a count of groups in this process. Only these private names let it be set.
    taken = set(c10d._world.pg_names.values())
    count = 0
    while (name := hashlib.sha256(f"{wanted} {count}".encode()).hexdigest()) in taken:
        count += 1
    original = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = original


FAILED = threading.Event()
"""Set after an error on this rank: there may be messages in flight that no other rank will ever answer."""

GRACE_SECONDS = 3.0
"""Time for the process group to close after an error.

It would wait for unanswered messages until its timeout, and all other ranks would wait for this one.
"""

SETTLE_SECONDS = 10.0
"""Time for gloo's threads to free the last tensors."""

THREADS = Path("/proc/self/task")


def end_at_exit() -> None:
    """Close process groups at exit, before the interpreter ends. Threads that outlive it abort the process."""
    atexit.unregister(_end)  # register only once
    atexit.register(_end)


def _end() -> None:
    if dist.is_initialized():
        if FAILED.is_set():
            # `destroy_process_group` may hang below. The thread ends the process from outside of it.
            threading.Thread(target=_give_up, daemon=True).start()
        dist.destroy_process_group()
    _settle()


def _give_up() -> None:
    time.sleep(GRACE_SECONDS)
    # `os._exit` flushes nothing, and the error is in these buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _settle() -> None:
    """Wait until gloo's threads sleep.

    A gloo thread frees its tensors after its work is done, and takes the interpreter's lock to do so. If the
    interpreter is ending, this aborts the process ("terminate called without an active exception"). The threads of a
    group that is still referenced are alive here.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    before, now = None, _gloo_threads()
    while now and time.monotonic() < deadline and (now != before or any(state != "S" for _, state, _ in now)):
        time.sleep(0.005)  # without the lock
        before, now = now, _gloo_threads()


def _gloo_threads() -> list[tuple[str, str, str]]:
    """Return id, state and number of sleeps of each gloo thread (only on Linux)."""
    threads = []
    for task in THREADS.glob("*"):
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:
            continue  # the thread has just ended
        facts = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if facts["Name"].startswith("pt_gloo"):
            threads.append((task.name, facts["State"][0], facts["voluntary_ctxt_switches"]))
    return sorted(threads)


DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")
# Slowest axis first, as in the shape of an array of ranks.
AXES = (*DENSE_AXES, *EXPERT_AXES[1:])
TOKEN_AXES = ("dp", "cp")
"""Axes along which ranks read different tokens."""
EXPERT_DATA_AXES = ("edp",)
"""Axes along which ranks hold the same experts."""
TENSOR_AXES = ("pp", "ep")
"""Axes along which ranks hold different tensors: other layers, or other experts."""


@dataclass(frozen=True)
class ParallelMesh:
    """Named axes over all ranks.

    Args:
        world_size: number of ranks of the mesh; must be ``pp * dp * cp * tp``.
        global_rank: rank of this process.
        tp, cp, pp: degrees; data parallelism uses the remaining ranks.
        ep, etp: expert degrees; there are ``world_size / (pp * ep * etp)`` replicas of each expert (``edp``).
        offset: first global rank of a mesh that is a part of the world, one of several side by side. Processes outside
            may hold such a mesh too, but have no place and no groups in it. None: the mesh is the whole world.

    Raises:
        LayoutError: the degrees do not divide the world size.

    Process groups are made on first use and kept. All members of a group must ask for it at the same time; other ranks
    do not take part. Meshes share groups, so several models on the same ranks need no further communicators.
    """

    world_size: int = 1
    global_rank: int = 0
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    offset: int | None = None
    _groups: dict[tuple[int, ...], ProcessGroup] = field(default_factory=dict, repr=False, compare=False)
    _ranks: dict[tuple[str, ...], tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for axis in ("tp", "cp", "pp", "ep", "etp"):
            if getattr(self, axis) < 1:
                raise LayoutError(f"parallel degree {axis}={getattr(self, axis)}; it must be at least 1.")
        check_world_size(
            self.world_size,
            tensor_parallel=self.tp,
            context_parallel=self.cp,
            pipeline_parallel=self.pp,
            expert_parallel=self.ep,
            expert_tensor_parallel=self.etp,
        )
        if self.offset is None and not self.contains(self.global_rank):
            raise LayoutError(
                f"rank {self.global_rank} lies outside a world of {self.world_size}; a grid that is a part of the "
                "world needs an offset."
            )
        if self.offset is not None and min(self.offset, self.global_rank) < 0:
            raise LayoutError(f"offset {self.offset} and rank {self.global_rank} must be at least 0.")

    @property
    def dp(self) -> int:
        """Data-parallel degree: the world size divided by tp, cp and pp."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Number of replicas of each expert shard."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def members(self) -> range:
        """Global ranks of the mesh."""
        first = self.offset or 0
        return range(first, first + self.world_size)

    def contains(self, rank: int) -> bool:
        """Whether a global rank has a place in the mesh."""
        return rank in self.members

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``."""
        # Ranks outside of the mesh may ask for sizes too; they look from its first rank.
        known = self.global_rank if self.contains(self.global_rank) else self.members.start
        return len(self._members(axis, self._coordinate(axis, known)))

    def rank(self, axis: str, of: int | None = None) -> int:
        """Return the coordinate of this process (or of global rank ``of``) along ``axis``.

        Raises:
            LayoutError: the rank is not in the mesh.
        """
        place = self._coordinate(axis, of)
        return self._members(axis, place).index(place)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the global ranks, in order, of this process's group along ``axes``.

        Raises:
            LayoutError: this process is not in the mesh.
        """
        if axes not in self._ranks:
            self._ranks[axes] = self._along(axes)
        return self._ranks[axes]

    def _along(self, axes: Sequence[str]) -> tuple[int, ...]:
        # `pp` alone belongs to both views, and gives the same ranks in both.
        order = EXPERT_AXES if any(_view(_whole(axis)) is EXPERT_AXES for axis in axes) else DENSE_AXES
        # Begin with this rank alone, and widen it along each axis.
        coordinates = {axis: {self.rank(axis)} for axis in order}
        for axis in axes:
            whole = _whole(axis)
            if whole not in order:
                raise LayoutError(f"axes {', '.join(axes)} mix the dense and the expert view of the mesh.")
            coordinates[whole] = {other for place in coordinates[whole] for other in self._members(axis, place)}
        # How far apart in rank numbers neighbors along each axis are.
        strides = [prod(self.size(axis) for axis in order[place + 1 :]) for place in range(len(order))]
        terms = [stride * np.array(sorted(coordinates[axis])) for stride, axis in zip(strides, order, strict=True)]
        return tuple((reduce(np.add.outer, terms).flatten() + self.members.start).tolist())

    def replicas(self, stage: int | None = None) -> list[tuple[int, ...]]:
        """Return the global ranks of each data-parallel replica, or those of one stage of its pipeline."""
        found: list[list[int]] = [[] for _ in range(self.dp)]
        for rank in self.members:
            if stage is None or self.rank("pp", of=rank) == stage:
                found[self.rank("dp", of=rank)].append(rank)
        return list(map(tuple, found))

    def group(self, *axes: str) -> ProcessGroup | None:
        """Return the process group along one axis, or along several together; None if it has one member.

        Raises:
            LayoutError: the group has several members, but torch.distributed is not initialized; or this process is not
                in the mesh.
        """
        ranks = self.ranks(*axes)
        if len(ranks) == 1:
            return None
        # Groups are found by their ranks: axes that cover the same ranks (`dp` and `edp` without experts) share one.
        if ranks not in self._groups:
            # The default group already joins all ranks: no second communicator.
            whole = self.offset is None and len(ranks) == self.world_size and dist.is_initialized()
            self._groups[ranks] = dist.group.WORLD if whole else shared_group(ranks)  # type: ignore[assignment]
        return self._groups[ranks]

    def device_mesh(self, device_type: str, axes: Sequence[str] = DENSE_AXES) -> DeviceMesh:
        """Return the same mesh as a torch ``DeviceMesh`` (for DTensor, FSDP2 and others).

        torch creates its groups, so all processes of the world must call this, also those outside of a partial mesh.

        Args:
            device_type: ``"cuda"`` or ``"cpu"``.
            axes: the dims of the ``DeviceMesh``, in any order: the axes of one view; axes of size 1 may be left out.

        Raises:
            LayoutError: the axes do not distinguish all ranks.
        """
        grid = np.full([self.size(axis) for axis in axes], -1)
        for rank in self.members:
            grid[tuple(self.rank(axis, of=rank) for axis in axes)] = rank
        if sorted(grid.flat) != list(self.members):
            raise LayoutError(
                f"axes {', '.join(axes)} do not tell the {self.world_size} ranks apart ({self.describe()}); "
                f"name each axis of one view whose size is not 1: {', '.join(DENSE_AXES)} or {', '.join(EXPERT_AXES)}."
            )
        return DeviceMesh(device_type, torch.from_numpy(grid), mesh_dim_names=tuple(axes))

    @property
    def everyone(self) -> ProcessGroup | None:
        """The group of all ranks of the mesh; None for a single rank."""
        return self.group(*DENSE_AXES)

    def describe(self) -> str:
        """Return one line for logs: the degrees that are not 1, and the ranks."""
        sizes = {axis: self.size(axis) for axis in (*DENSE_AXES, "ep", "etp")}
        shown = " x ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return f"{ranks}{'' if self.offset is None else f' from {self.offset}'}: {shown or 'one device'}"

    def _coordinate(self, axis: str, of: int | None = None) -> int:
        """Return the place of a rank on the whole axis that contains ``axis``."""
        whole = _whole(axis)
        order = _view(whole)
        # The product of all faster axes.
        stride = prod(int(getattr(self, name)) for name in order[order.index(whole) + 1 :])
        rank = self.global_rank if of is None else of
        if not self.contains(rank):
            raise LayoutError(
                f"rank {rank} is not in the mesh of ranks {self.members[0]} to {self.members[-1]}; ask mesh.contains() "
                "first."
            )
        return (rank - self.members.start) // stride % int(getattr(self, whole))

    def _members(self, axis: str, place: int) -> Sequence[int]:
        """Return the places on the whole axis that form one group along ``axis`` with ``place``."""
        whole, sign, numbers = _parsed(axis)
        size = int(getattr(self, whole))
        if sign == ":":
            some = tuple(map(int, numbers.split("+")))
            if max(some) >= size:
                raise LayoutError(f"axis {whole} has {size} places; {axis!r} names one beyond.")
            return some if place in some else (place,)
        if not sign:
            return range(size)
        # `a%n` groups neighbors: the run in which the place lies. `a/n` groups equal places of all runs.
        run = int(numbers)
        if run < 1 or size % run:
            raise LayoutError(f"axis {whole} of size {size} cannot be read in runs of {run} ({axis!r}).")
        return range(place - place % run, place - place % run + run) if sign == "%" else range(place % run, size, run)


@lru_cache
def _parsed(axis: str) -> tuple[str, str, str]:
    """Return the whole axis, the sign (one of ``/ % :``, or empty), and the numbers after it."""
    match = re.fullmatch(r"(\w+?)(?:([/%])(\d+)|(:)(\d+(?:\+\d+)*))?", axis)
    if not match or match[1] not in AXES:
        raise LayoutError(f"unknown mesh axis {axis!r}; known: {', '.join(AXES)}." + nearest(axis, AXES))
    return match[1], match[2] or match[4] or "", match[3] or match[5] or ""


def _whole(axis: str) -> str:
    return _parsed(axis)[0]


def _view(axis: str) -> tuple[str, ...]:
    """Return the view of the ranks that contains ``axis``; ``pp`` is in both, and the dense view is used."""
    return DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES


def join_ranks(
    device: torch.device, *, tp: int = 1, ep: int = 1, pp: int = 1
) -> tuple[ParallelMesh | None, torch.device]:
    """Join the processes that torchrun has started; return their mesh, and the device of this one.

    Args:
        device: cpu or cuda. Each process has a GPU of its own.
        tp, ep, pp: see :class:`ParallelMesh`.

    Returns:
        None for the mesh if this is a single process.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        return None, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        # Threads of the group that outlive the interpreter would abort the process.
        end_at_exit()
    return ParallelMesh(dist.get_world_size(), dist.get_rank(), tp=tp, ep=ep, pp=pp), device
