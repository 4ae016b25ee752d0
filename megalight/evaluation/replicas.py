"""Replicas of a model that share the requests of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megalight.inference import ParallelGPT
from megalight.inference.parallel import GenerativeModel

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Replicas:
    """The replicas of a model, of which each computes a part of the requests.

    Attributes:
        group: one rank of each replica, this one among them; None: there is a single replica.
    """

    group: ProcessGroup | None = None

    @classmethod
    def of(cls, model: GenerativeModel) -> Replicas:
        """Return the replicas of a model: the data-parallel ranks, or all ranks if each holds a whole model."""
        if isinstance(model, ParallelGPT):
            return cls(model.mesh.group("dp"))
        return cls(dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None)

    def share(self, items: Sequence[T], compute: Callable[[list[T]], list[R]]) -> list[R]:
        """Compute every item on one replica; return all results on all of them, in the order of the items.

        Neighbors go to different replicas, so items that are sorted by their length give equal work.
        """
        if self.group is None:
            return compute(list(items))
        count = dist.get_world_size(self.group)
        parts: list[list[R]] = [[] for _ in range(count)]
        dist.all_gather_object(parts, compute(list(items[dist.get_rank(self.group) :: count])), self.group)
        return [parts[place % count][place // count] for place in range(len(items))]
