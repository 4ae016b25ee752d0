"""Dispatch by all-gather: every rank sees all tokens of its group, and keeps those of its own experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.nn.moe import Dispatcher, LocalDispatcher
from megalight.nn.moe.dispatch import Compute
from megalight.parallel.collectives import all_gather, reduce_scatter, start_all_gather
from megalight.parallel.tensor.shared import Shared


class AllGatherDispatcher(Dispatcher):
    """Gathers tokens and routes over ``ep``, runs the experts of this rank, and reduce-scatters what they made.

    Ranks may bring different numbers of tokens; all must bring some at the same time, be it none. Memory and bytes grow
    with the group.

    Args:
        shared: what the parallel layers share.
        first: number of this rank's first expert.
    """

    def __init__(self, shared: Shared, first: int) -> None:
        super().__init__()
        self.shared = shared
        self.first = first
        self.local = LocalDispatcher()

    def forward(self, hidden: Tensor, chosen: Tensor, num_experts: int, compute: Compute) -> Tensor:
        """``[T, h] -> [T, h]``. The host waits for the largest number of tokens, and for the counts."""
        group = self.shared.mesh.group("ep")
        longest = _longest(hidden, group)
        missing = longest - len(hidden)
        everyone = all_gather(F.pad(hidden, (0, 0, 0, missing)), group)
        # padding goes to expert -1, which no rank has
        routes = start_all_gather(F.pad(chosen, (0, missing), value=-1), group).wait() - self.first
        mine = ((routes >= 0) & (routes < num_experts)).nonzero().flatten()
        made = self.local(everyone[mine], routes[mine], num_experts, compute)
        whole = torch.zeros_like(everyone).index_copy(0, mine, made)
        return reduce_scatter(whole, group)[: len(hidden)]

    def extra_repr(self) -> str:
        """Where this rank's experts begin, for printing."""
        return f"first={self.first}"


def _longest(hidden: Tensor, group: ProcessGroup | None) -> int:
    """Most tokens that a rank brings; at least one, as not all backends send nothing."""
    counts = start_all_gather(torch.tensor([len(hidden)], device=hidden.device), group).wait()
    return max(1, int(counts.max()))
