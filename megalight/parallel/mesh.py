"""The grid of ranks: one frozen object with named axes, built once and passed by argument.

Rank order is Megatron's, fastest first: ``tp, cp, dp, pp``. The same ranks seen by experts are ``etp, ep, edp, pp``
(parallel folding). "Axis" is a mesh word; tensors have "dims".

An axis can be read as two: ``"tp%2"`` is the place within runs of 2 neighbouring ranks of ``tp``, ``"tp/2"`` the run
(both as in the arithmetic of coordinates). With 2 KV heads and ``tp = 4``, ``"tp/2"`` counts KV heads and ``"tp%2"``
their replicas. ``"pp:0+3"`` is the ranks at the places 0 and 3 of ``pp`` alone: the stages that share a tied weight.
"""

from __future__ import annotations

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
from megalight.parallel.groups import shared_group

DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")
AXES = (*DENSE_AXES, *EXPERT_AXES[1:])
TOKEN_AXES = ("dp", "cp")
"""Axes along which ranks read different tokens."""
EXPERT_DATA_AXES = ("edp",)
"""Axes along which ranks hold the same experts."""


@dataclass(frozen=True)
class ParallelMesh:
    """Named axes over all ranks.

    Args:
        world_size: number of ranks of the grid; must be ``pp * dp * cp * tp``.
        global_rank: this process.
        tp, cp, pp: degrees; data parallelism takes what is left.
        ep, etp: expert degrees; ``world_size / (pp * ep * etp)`` replicas of each expert (``edp``).
        offset: first global rank of a grid that is a part of the world, one of several side by side; processes outside
            may hold it too, but have no place and no groups in it. None: the grid is the whole world.

    Raises:
        LayoutError: the degrees do not divide the world size.

    Process groups are made on first use and kept. The members of a group must ask for it at the same time; other ranks
    need not know of it. Meshes share them: several models on the same ranks do not multiply communicators.
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
        for names, product in (
            ("tp x cp x pp", self.tp * self.cp * self.pp),
            ("etp x ep x pp", self.etp * self.ep * self.pp),
        ):
            if self.world_size % product:
                raise LayoutError(
                    f"world size {self.world_size} is not a multiple of {names} = {product}. "
                    f"Use {product} x n processes, or lower a degree."
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
        """Data-parallel degree: what tp, cp and pp leave of the world."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Replicas of each expert shard."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def members(self) -> range:
        """Global ranks of the grid."""
        first = self.offset or 0
        return range(first, first + self.world_size)

    def contains(self, rank: int) -> bool:
        """Whether a global rank has a place in the grid."""
        return rank in self.members

    def size(self, axis: str) -> int:
        """Ranks along ``axis``."""
        known = self.global_rank if self.contains(self.global_rank) else self.members.start
        return len(self._members(axis, self._coordinate(axis, known)))

    def rank(self, axis: str, of: int | None = None) -> int:
        """Coordinate of this process along ``axis`` (or of global rank ``of``).

        Raises:
            LayoutError: it is not in the grid.
        """
        place = self._coordinate(axis, of)
        return self._members(axis, place).index(place)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Global ranks of the group along ``axes`` that this process is in, in rank order.

        Raises:
            LayoutError: it is not in the grid.
        """
        if axes not in self._ranks:
            self._ranks[axes] = self._along(axes)
        return self._ranks[axes]

    def _along(self, axes: Sequence[str]) -> tuple[int, ...]:
        order = EXPERT_AXES if any(_view(_whole(axis)) is EXPERT_AXES for axis in axes) else DENSE_AXES
        coordinates = {axis: {self.rank(axis)} for axis in order}
        for axis in axes:
            whole = _whole(axis)
            if whole not in order:
                raise LayoutError(f"axes {', '.join(axes)} mix the dense and the expert view of the mesh.")
            coordinates[whole] = {other for place in coordinates[whole] for other in self._members(axis, place)}
        strides = [prod(self.size(axis) for axis in order[place + 1 :]) for place in range(len(order))]
        terms = [stride * np.array(sorted(coordinates[axis])) for stride, axis in zip(strides, order, strict=True)]
        return tuple((reduce(np.add.outer, terms).flatten() + self.members.start).tolist())

    def group(self, *axes: str) -> ProcessGroup | None:
        """The process group along one axis, or along several taken together; None where it has one member.

        Raises:
            LayoutError: there are several members, but torch.distributed is not initialised; this process is not in
                the grid.
        """
        ranks = self.ranks(*axes)
        if len(ranks) == 1:
            return None
        if ranks not in self._groups:
            whole = self.offset is None and len(ranks) == self.world_size and dist.is_initialized()
            self._groups[ranks] = dist.group.WORLD if whole else shared_group(ranks)  # type: ignore[assignment]
        return self._groups[ranks]

    def device_mesh(self, device_type: str, axes: Sequence[str] = DENSE_AXES) -> DeviceMesh:
        """The same grid as a torch ``DeviceMesh`` (for DTensor, FSDP2 and the like).

        torch makes its groups: all processes of the world must call this, those outside of a part of it too.

        Args:
            device_type: ``"cuda"`` or ``"cpu"``.
            axes: the mesh's dims, in any order: those of one view, of which axes of size 1 may be left out.

        Raises:
            LayoutError: the axes do not tell all ranks apart.
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
        """The group of all ranks of the grid; None for one."""
        return self.group(*DENSE_AXES)

    def describe(self) -> str:
        """One line for logs: the degrees that are not 1, and the ranks."""
        sizes = {axis: self.size(axis) for axis in (*DENSE_AXES, "ep", "etp")}
        shown = " x ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return f"{ranks}{'' if self.offset is None else f' from {self.offset}'}: {shown or 'one device'}"

    def _coordinate(self, axis: str, of: int | None = None) -> int:
        """Place of a rank on the whole axis that ``axis`` is part of."""
        whole = _whole(axis)
        order = _view(whole)
        stride = prod(int(getattr(self, name)) for name in order[order.index(whole) + 1 :])
        rank = self.global_rank if of is None else of
        if not self.contains(rank):
            raise LayoutError(
                f"rank {rank} is not in the mesh of ranks {self.members[0]} to {self.members[-1]}; ask mesh.contains() "
                "first."
            )
        return (rank - self.members.start) // stride % int(getattr(self, whole))

    def _members(self, axis: str, place: int) -> Sequence[int]:
        """Places on the whole axis of the ranks that form one group along ``axis`` with the one at ``place``."""
        whole, sign, numbers = _parsed(axis)
        size = int(getattr(self, whole))
        if sign == ":":
            some = tuple(map(int, numbers.split("+")))
            if max(some) >= size:
                raise LayoutError(f"axis {whole} has {size} places; {axis!r} names one beyond.")
            return some if place in some else (place,)
        if not sign:
            return range(size)
        run = int(numbers)
        if run < 1 or size % run:
            raise LayoutError(f"axis {whole} of size {size} cannot be read in runs of {run} ({axis!r}).")
        return range(place - place % run, place - place % run + run) if sign == "%" else range(place % run, size, run)


@lru_cache
def _parsed(axis: str) -> tuple[str, str, str]:
    """The whole axis, ``/ % :`` or nothing, and the numbers behind."""
    match = re.fullmatch(r"(\w+?)(?:([/%])(\d+)|(:)(\d+(?:\+\d+)*))?", axis)
    if not match or match[1] not in AXES:
        raise LayoutError(f"unknown mesh axis {axis!r}; known: {', '.join(AXES)}." + nearest(axis, AXES))
    return match[1], match[2] or match[4] or "", match[3] or match[5] or ""


def _whole(axis: str) -> str:
    return _parsed(axis)[0]


def _view(axis: str) -> tuple[str, ...]:
    """The view of the ranks that ``axis`` belongs to; ``pp`` is in both and read in the dense one."""
    return DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES
