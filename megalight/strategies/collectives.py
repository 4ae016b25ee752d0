"""Collectives that Lightning calls: means of metrics, decisions, barriers, broadcasts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.parallel.groups import shared_group
from megalight.parallel.mesh import TOKEN_AXES, ParallelMesh


class Collectives:
    """Collectives of a strategy. Values are reduced over the ranks with different data, decisions over all ranks.

    In a step that only some ranks run, those over all ranks raise a :class:`~megalight.errors.ConfigurationError`: they
    would wait for ranks that never come.

    Attributes:
        mesh: the grid of ranks.
        in_part: what divides the step that runs: ``pp=2``. None: all ranks run it, or none is running.
    """

    mesh: ParallelMesh
    world_size: int
    in_part: str | None = None
    _host_group: dist.ProcessGroup | None = None

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """This process's device."""

    @contextmanager
    def part(self, what: str, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Enter ``context``, and run code of the user's that other ranks do not run.

        Args:
            what: divides the step, for messages.
        """
        before, self.in_part = self.in_part, what
        try:
            with context():
                yield
        finally:
            self.in_part = before

    def _together(self, call: str) -> None:
        if self.in_part is not None:
            raise ConfigurationError(
                f"{call} waits for all ranks, and with {self.in_part} only some of them run this forward_step or "
                "loss_step. Call it in a hook between steps, such as on_train_batch_end, return the value as one of "
                "loss_step's metrics, or use strategy.reduce(value), which asks the ranks of this part with other data."
            )

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks with different data. Ranks of one replica have equal values."""
        if not isinstance(tensor, Tensor):
            return tensor
        group = group or self.mesh.group(*TOKEN_AXES)
        if group is None:
            return tensor
        name = str(getattr(reduce_op, "name", reduce_op) or "mean").lower()
        mean = name in ("mean", "avg")
        op = dist.ReduceOp.SUM if mean else getattr(dist.ReduceOp, name.upper())
        # A copy: the caller's metric must not change.
        value = tensor.to(self.root_device, copy=True)
        # A mean of integers is a fraction.
        if mean and not value.is_floating_point():
            value = value.float()
        dist.all_reduce(value, op=op, group=group)
        return value / dist.get_world_size(group) if mean else value

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all (or any) of *all* ranks decided so, inside replicas too."""
        return not self.any_rank(not decision) if all else self.any_rank(decision)

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank, without touching the device."""
        return self.largest([int(flag)]) == [1]

    def largest(self, values: list[int]) -> list[int]:
        """Return the maximum of each value over all ranks, without touching the device."""
        self._together("a decision of all ranks (reduce_boolean_decision)")
        # On the host: a device collective would wait for all queued kernels, in every step.
        return values if self.world_size == 1 else _largest(values, self.host_group())

    def largest_along(self, axis: str) -> Callable[[list[int]], list[int]]:
        """Return what does the same over the ranks along an axis of the mesh only; these ranks call this together."""
        ranks = self.mesh.ranks(axis)
        if len(ranks) == 1:
            return lambda values: values
        group = shared_group(ranks, "decisions on the host", backend="gloo")
        return lambda values: _largest(values, group)

    def host_group(self) -> dist.ProcessGroup | None:
        """A gloo group over all ranks, for decisions on the host that must not touch the device."""
        if self._host_group is None:
            backend = dist.get_backend()
            # All ranks make this group together, at the first decision that they take together.
            self._host_group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")
        return self._host_group

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self._together("barrier")
        if self.world_size > 1 and dist.is_initialized():
            dist.barrier(group=self.host_group())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object of rank ``src`` to all ranks."""
        self._together("broadcast")
        if self.world_size == 1 or not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src, group=self.host_group())
        return box[0]


def _largest(values: list[int], group: dist.ProcessGroup | None) -> list[int]:
    found = torch.tensor(values)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [int(value) for value in found]
