"""What Lightning asks of all ranks: means of metrics, decisions, barriers, broadcasts."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.parallel.mesh import TOKEN_AXES, ParallelMesh


class Collectives:
    """Collectives of a strategy: numbers over the ranks that see different data, decisions over all.

    Attributes:
        mesh: the grid of ranks.
    """

    mesh: ParallelMesh
    world_size: int
    _host_group: dist.ProcessGroup | None = None

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """This process's device."""

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks that see different data; ranks of one replica hold equal values."""
        if not isinstance(tensor, Tensor):
            return tensor
        group = group or self.mesh.group(*TOKEN_AXES)
        if group is None:
            return tensor
        name = str(getattr(reduce_op, "name", reduce_op) or "mean").lower()
        mean = name in ("mean", "avg")
        op = dist.ReduceOp.SUM if mean else getattr(dist.ReduceOp, name.upper())
        value = tensor.to(self.root_device, copy=True)
        if mean and not value.is_floating_point():
            value = value.float()
        dist.all_reduce(value, op=op, group=group)
        return value / dist.get_world_size(group) if mean else value

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) of *all* ranks, replicas or not, decided so."""
        return not self.any_rank(not decision) if all else self.any_rank(decision)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is raised on any rank; agreed upon on the host."""
        return self.largest([int(flag)]) == [1]

    def largest(self, values: list[int]) -> list[int]:
        """The largest over all ranks of each value; agreed upon on the host."""
        if self.world_size == 1:
            return values
        found = torch.tensor(values)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.host_group())
        return [int(value) for value in found]

    def host_group(self) -> dist.ProcessGroup | None:
        """A gloo group over all ranks: for decisions on the host that must not touch the device."""
        if self._host_group is None:
            backend = dist.get_backend()
            self._host_group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")
        return self._host_group

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self.world_size > 1 and dist.is_initialized():
            dist.barrier(group=self.host_group())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of rank ``src`` to all ranks."""
        if self.world_size == 1 or not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src, group=self.host_group())
        return box[0]
