"""Dispatch by all-gather: every rank gets all tokens of its group, and uses those of its own experts."""

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
    """Gathers tokens and routes over ``ep``, runs this rank's experts, and reduce-scatters the results.

    Ranks may have different numbers of tokens, also none, but all must call it at the same time. Memory and bytes grow
    with the size of the group.

    Args:
        shared: the state that all parallel layers share.
        first: index of this rank's first expert.
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
        # All ranks must gather equal sizes, so shorter inputs are padded.
        missing = longest - len(hidden)
        everyone = all_gather(F.pad(hidden, (0, 0, 0, missing)), group)
        # Padding is routed to expert -1, which no rank has.
        routes = start_all_gather(F.pad(chosen, (0, missing), value=-1), group).wait() - self.first
        mine = ((routes >= 0) & (routes < num_experts)).nonzero().flatten()
        made = self.local(everyone[mine], routes[mine], num_experts, compute)
        whole = torch.zeros_like(everyone).index_copy(0, mine, made)
        return reduce_scatter(whole, group)[: len(hidden)]

    def extra_repr(self) -> str:
        """Return the index of this rank's first expert, for printing."""
        return f"first={self.first}"


def _longest(hidden: Tensor, group: ProcessGroup | None) -> int:
    """Return the largest number of tokens of a rank; at least one, because some backends cannot send empty tensors."""
    counts = start_all_gather(torch.tensor([len(hidden)], device=hidden.device), group).wait()
    return max(1, int(counts.max()))
