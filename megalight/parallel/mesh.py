"""The grid of ranks: one frozen object with named axes, built once and passed by argument.

Rank order is Megatron's, fastest first: ``tp, cp, dp, pp``. The same ranks seen by experts are ``etp, ep, edp, pp``
(parallel folding). "Axis" is a mesh word; tensors have "dims".

An axis can be read as two: ``"tp%2"`` is the place within runs of 2 neighbouring ranks of ``tp``, ``"tp/2"`` the run
(both as in the arithmetic of coordinates). With 2 KV heads and ``tp = 4``, ``"tp/2"`` counts KV heads and ``"tp%2"``
their replicas.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megalight.errors import LayoutError, nearest

DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")
AXES = (*DENSE_AXES, *EXPERT_AXES[1:])


@dataclass(frozen=True)
class ParallelMesh:
    """Named axes over all ranks.

    Args:
        world_size: number of ranks; must be ``pp * dp * cp * tp``.
        global_rank: this process.
        tp, cp, pp: degrees; data parallelism takes what is left.
        ep, etp: expert degrees; ``world_size / (pp * ep * etp)`` replicas of each expert (``edp``).

    Raises:
        LayoutError: the degrees do not divide the world size.

    Process groups are made on first use and kept. Every rank must ask for the same groups in the same order, which
    setup code that runs alike on all ranks does.
    """

    world_size: int = 1
    global_rank: int = 0
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    _groups: dict[tuple[int, ...], ProcessGroup] = field(default_factory=dict, repr=False, compare=False)

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
        if not 0 <= self.global_rank < self.world_size:
            raise LayoutError(f"rank {self.global_rank} lies outside a world of {self.world_size}.")

    @property
    def dp(self) -> int:
        """Data-parallel degree: what tp, cp and pp leave of the world."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Replicas of each expert shard."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def size(self, axis: str) -> int:
        """Ranks along ``axis``."""
        return self._resolve(axis)[2]

    def rank(self, axis: str, of: int | None = None) -> int:
        """Coordinate of this process along ``axis`` (or of global rank ``of``)."""
        whole, step, size = self._resolve(axis)
        order = _view(whole)
        stride = prod(int(getattr(self, name)) for name in order[order.index(whole) + 1 :]) * step
        return (self.global_rank if of is None else of) // stride % size

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Global ranks of the group along ``axes`` that this process is in, in rank order."""
        order = EXPERT_AXES if any(_view(self._resolve(axis)[0]) is EXPERT_AXES for axis in axes) else DENSE_AXES
        coordinates = {axis: np.array([self.rank(axis)]) for axis in order}
        for axis in dict.fromkeys(axes):
            whole, step, size = self._resolve(axis)
            if whole not in order:
                raise LayoutError(f"axes {', '.join(axes)} mix the dense and the expert view of the mesh.")
            steps = step * (np.arange(size) - self.rank(axis))
            coordinates[whole] = np.unique(np.add.outer(coordinates[whole], steps))
        strides = [prod(self.size(axis) for axis in order[place + 1 :]) for place in range(len(order))]
        terms = [stride * coordinates[axis] for stride, axis in zip(strides, order, strict=True)]
        return tuple(reduce(np.add.outer, terms).flatten().tolist())

    def group(self, *axes: str) -> ProcessGroup | None:
        """The process group along one axis, or along several taken together; None where it has one member.

        Raises:
            LayoutError: there are several members, but torch.distributed is not initialised.
        """
        ranks = self.ranks(*axes)
        if len(ranks) == 1:
            return None
        if ranks not in self._groups:
            if not dist.is_initialized():
                raise LayoutError(
                    f"the group along {' x '.join(axes)} has {len(ranks)} ranks, but torch.distributed is not "
                    "initialised; call torch.distributed.init_process_group first."
                )
            if len(ranks) == self.world_size:
                self._groups[ranks] = dist.group.WORLD  # type: ignore[assignment]
            else:
                group = dist.new_group(list(ranks), use_local_synchronization=True)
                assert isinstance(group, ProcessGroup)
                self._groups[ranks] = group
        return self._groups[ranks]

    def device_mesh(self, device_type: str, axes: Sequence[str] = DENSE_AXES) -> DeviceMesh:
        """The same grid as a torch ``DeviceMesh`` (for DTensor, FSDP2 and the like)."""
        grid = np.arange(self.world_size).reshape([self.size(axis) for axis in axes])
        return DeviceMesh(device_type, torch.from_numpy(grid), mesh_dim_names=tuple(axes))

    def describe(self) -> str:
        """One line for logs: the degrees that are not 1, and the world size."""
        sizes = {axis: self.size(axis) for axis in (*DENSE_AXES, "ep", "etp")}
        shown = " x ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''}: {shown or 'one device'}"

    def _resolve(self, axis: str) -> tuple[str, int, int]:
        """The named axis that ``axis`` lies on, the step between its ranks there, and how many they are."""
        match = re.fullmatch(r"(\w+?)(?:([/%])(\d+))?", axis)
        if not match or match[1] not in AXES:
            raise LayoutError(f"unknown mesh axis {axis!r}; known: {', '.join(AXES)}." + nearest(axis, AXES))
        whole = match[1]
        size = int(getattr(self, whole))
        if match[2] is None:
            return whole, 1, size
        run = int(match[3])
        if run < 1 or size % run:
            raise LayoutError(f"axis {whole} of size {size} cannot be read in runs of {run} ({axis!r}).")
        return (whole, 1, run) if match[2] == "%" else (whole, run, size // run)


def _view(axis: str) -> tuple[str, ...]:
    """The view of the ranks that ``axis`` belongs to; ``pp`` is in both and read in the dense one."""
    return DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES
