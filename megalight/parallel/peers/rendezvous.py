"""Map symmetric memory into all ranks of a group, whatever groups each of them met in before.

torch names a meeting by a number that counts those of the whole process (pytorch/pytorch issue 196082). Ranks with
different numbers would wait for each other for ever: stages inside a pipeline have two neighbours, the first has one.
So ranks that are behind first meet with nobody, until all numbers are equal.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

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

    def meet(self, memory: Tensor, group: ProcessGroup) -> Any:
        """Return torch's handle of ``memory`` on all ranks of the group. They call this together.

        Args:
            memory: this rank's part, symmetric memory of torch.
        """
        counts: list[Any] = [None] * group.size()
        dist.all_gather_object(counts, self.count, group=group)
        while self.count < max(counts):
            alone = symmetric_memory().empty(LEAST_BYTES, dtype=torch.uint8, device=memory.device)
            self._meet(alone, shared_group((dist.get_rank(),), "symmetric memory"))
        return self._meet(memory, group)

    def _meet(self, memory: Tensor, group: ProcessGroup) -> Any:
        self.count += 1
        return symmetric_memory().rendezvous(memory, group)


MEETINGS = Meetings()
"""Those of this process."""
