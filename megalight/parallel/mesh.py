"""The mesh of ranks: one frozen object with named axes, built once and passed by argument.

Rank order is Megatron's, fastest first: ``tp, cp, dp, pp``. Experts see the same ranks as ``etp, ep, edp, pp``
(parallel folding). "Axis" is a word for meshes; tensors have "dims".

An axis can be divided into two: ``"tp%2"`` is the place within runs of 2 neighboring ranks of ``tp``, and ``"tp/2"``
is the number of the run (both as in integer arithmetic on coordinates). With 2 KV heads and ``tp = 4``, ``"tp/2"``
counts KV heads and ``"tp%2"`` their replicas. ``"pp:0+3"`` means only the ranks at places 0 and 3 of ``pp``: for
example the stages that share a tied weight.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megalight.errors import LayoutError, nearest
from megalight.parallel.degrees import check_world_size
from megalight.parallel.groups import end_at_exit, shared_group

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
