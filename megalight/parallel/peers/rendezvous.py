"""Map symmetric memory into all ranks of a group, whatever groups each of them met in before.

torch names a meeting by a number that counts those of the whole process (pytorch/pytorch issue 196082). Ranks with
different numbers would wait for each other for ever: stages inside a pipeline have two neighbors, the first has one.
So ranks that are behind first meet with nobody, until all numbers are equal.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from megalight.imports import symmetric_memory
from megalight.parallel.groups import shared_group

LEAST_BYTES = 16


class Meetings:
    """All meetings of a process.

    Attributes:
        count: their number so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._of_groups: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()

    def meet(self, memory: Tensor, group: ProcessGroup) -> Any:
        """Return torch's handle of ``memory`` on all ranks of the group. They call this together.

        Args:
            memory: this rank's part, symmetric memory of torch.
        """
        latest = max(self._counts(group))
        while self.count < latest:
            alone = symmetric_memory().empty(LEAST_BYTES, dtype=torch.uint8, device=memory.device)
            self._meet(alone, shared_group((dist.get_rank(),), "symmetric memory"))
        return self._meet(memory, group)

    def _counts(self, group: ProcessGroup) -> list[int]:
        """Return the numbers of all ranks, by the group's store: no tensor may leave a recorded step."""
        number = self._of_groups[group] = self._of_groups.get(group, 0) + 1
        store = dist.PrefixStore(f"meeting {number}", c10d._get_process_group_store(group))
        store.set(str(group.rank()), str(self.count))
        return [int(store.get(str(rank))) for rank in range(group.size())]

    def _meet(self, memory: Tensor, group: ProcessGroup) -> Any:
        self.count += 1
        return symmetric_memory().rendezvous(memory, group)


MEETINGS = Meetings()
"""Those of this process."""
