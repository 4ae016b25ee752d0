"""The grid of ranks: one frozen object with named axes, built once and passed by argument.

Rank order is Megatron's, fastest first: ``tp, cp, dp, pp``. The same ranks seen by experts are ``etp, ep, edp, pp``
(parallel folding). "Axis" is a mesh word; tensors have "dims".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megalight.errors import LayoutError, nearest

DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")


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
    _factors: dict[str, tuple[str, int, int]] = field(default_factory=dict, repr=False, compare=False)
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

    @property
    def dp(self) -> int:
        """Data-parallel degree: what tp, cp and pp leave of the world."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Replicas of each expert shard."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def factor(self, axis: str, outer: tuple[str, int], inner: str) -> ParallelMesh:
        """A mesh where ``axis`` can also be addressed as two axes: ``outer = (name, size)`` and ``inner``, the rest.

        Neighbouring ranks of ``axis`` share the outer coordinate. Used for KV heads fewer than TP: ``kv_shard`` x
        ``kv_replica``. Groups are shared with this mesh; factoring the same way twice is harmless.
        """
        name, size = outer
        whole = self.size(axis)
        if whole % size:
            raise LayoutError(f"axis {axis} of size {whole} cannot be factored into {name}={size} and {inner}.")
        factors = {**self._factors, name: (axis, whole // size, size), inner: (axis, 1, whole // size)}
        clone = ParallelMesh(
            self.world_size, self.global_rank, self.tp, self.cp, self.pp, self.ep, self.etp, factors, self._groups
        )
        return clone

    def size(self, axis: str) -> int:
        """Ranks along ``axis``."""
        if axis in self._factors:
            return self._factors[axis][2]
        self._check(axis)
        return int(getattr(self, axis))

    def rank(self, axis: str, of: int | None = None) -> int:
        """This process's coordinate along ``axis`` (or that of global rank ``of``)."""
        global_rank = self.global_rank if of is None else of
        if axis in self._factors:
            parent, stride, size = self._factors[axis]
            return self.rank(parent, of) // stride % size
        self._check(axis)
        order = DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES
        stride = prod(int(getattr(self, name)) for name in order[order.index(axis) + 1 :])
        return global_rank // stride % self.size(axis)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Global ranks of the group along ``axes`` that this process is in, in rank order."""
        return tuple(self._members(axes))

    def group(self, *axes: str) -> ProcessGroup | None:
        """The process group along one axis, or along several taken together; None where it has one member."""
        ranks = self.ranks(*axes)
        if len(ranks) == 1:
            return None
        if ranks not in self._groups:
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

    def _members(self, axes: tuple[str, ...]) -> list[int]:
        """Ranks that agree with this one on every coordinate outside ``axes``; from index arithmetic, not a search."""
        order = EXPERT_AXES if any(axis in ("edp", "ep", "etp") for axis in axes) else DENSE_AXES
        grid = np.arange(self.world_size).reshape([self.size(axis) for axis in order])
        index: list[slice | int | np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        for axis in order:
            if axis in axes:
                index.append(slice(None))
                continue
            factors = [name for name in axes if name in self._factors and self._factors[name][0] == axis]
            coordinate = self.rank(axis)
            if not factors:
                index.append(slice(coordinate, coordinate + 1))
                continue
            (name,) = factors
            _, stride, size = self._factors[name]
            base = coordinate - self.rank(name) * stride
            index.append(base + stride * np.arange(size))
        for axis in axes:
            if axis not in order and axis not in self._factors:
                self._check(axis)
                raise LayoutError(f"axes {axes} mix the dense and the expert view of the mesh.")
        return sorted(int(rank) for rank in grid[tuple(index)].flatten())

    def _check(self, axis: str) -> None:
        known = (*DENSE_AXES, "edp", "ep", "etp")
        if axis not in known:
            raise LayoutError(
                f"unknown mesh axis {axis!r}; known: {', '.join((*known, *self._factors))}." + nearest(axis, known)
            )
