"""Data-parallel ranks that meet in collectives inside a forward pass: experts' tokens come from all of them.

Such ranks must run equally many micro-batches. They agree on the largest number, and those with fewer run *empty* ones:
a real micro-batch once more, whose losses are multiplied by zero. It takes part in every collective and adds nothing to
losses, gradients and totals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.parallel.groups import new_group
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.types import Loss


@dataclass  # not frozen: Lightning moves batches to the device by copying dataclasses field by field
class Empty:
    """A batch, or a micro-batch, that runs like ``batch`` and counts for nothing."""

    batch: Any


def is_empty(batch: Any) -> bool:
    """Whether a micro-batch counts for nothing."""
    return isinstance(batch, Empty)


def contents(batch: Any) -> Any:
    """What to run for a micro-batch."""
    return batch.batch if isinstance(batch, Empty) else batch


def emptied(batch: Any) -> Empty:
    """The same, counting for nothing."""
    return Empty(contents(batch))


def nothing(loss: Loss) -> Loss:
    """The loss of an empty micro-batch: zero, with a gradient of zero along the same graph.

    A loss that is not a finite number has no such gradient: the real micro-batch's is then not finite either.
    """
    auxiliary = {name: value * 0 for name, value in loss.auxiliary.items()}
    metrics = {name: (torch.zeros_like(a), torch.zeros_like(b)) for name, (a, b) in loss.metrics.items()}
    return Loss(loss.sum * 0, auxiliary, metrics)


def couples(specs: Iterable[ShardSpec], mesh: ParallelMesh) -> bool:
    """Whether ranks along ``dp`` meet inside a forward pass: some do not hold the same parameters."""
    replicas = set(mesh.ranks("dp"))
    return any(not replicas <= set(mesh.ranks(*data)) for data in {spec.data for spec in specs})


class Coupling:
    """How the ranks along ``dp`` agree on numbers, on the host. All of them call each method at the same time."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        self._group: ProcessGroup | None = None

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self._group is None:
            self._group = new_group(self.mesh.ranks("dp"), "counts", backend="gloo")
        largest: Tensor = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return int(largest)

    def fill_up(self, micro_batches: Sequence[Any]) -> list[Any]:
        """The micro-batches, and as many empty ones as it takes for all ranks to have equally many."""
        missing = self.most(len(micro_batches)) - len(micro_batches)
        return [*micro_batches, *[emptied(micro_batches[-1])] * missing]
