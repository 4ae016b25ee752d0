"""MoE dispatch by all-gather: every rank gets all tokens of its group, and uses those of its own experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.nn.moe import Dispatcher, Grouped, aligned
from megalight.ops.permute import Permutation, permutation, permute, unpermute
from megalight.ops.router import Routes
from megalight.parallel.collectives import all_gather, reduce_scatter, start_all_gather
from megalight.parallel.expert.options import DISPATCHERS

if TYPE_CHECKING:
    from megalight.parallel.tensor.shared import Shared


@DISPATCHERS.register("all_gather")
class AllGatherDispatcher(Dispatcher):
    """Gathers tokens and routes over ``ep`` and ``etp``, and reduce-scatters the outputs of this rank's experts.

    Ranks may have different numbers of tokens, also none, but all must call it at the same time. Memory and bytes grow
    with the size of the group.

    Args:
        shared: the state that all parallel layers share.
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    def dispatch(
        self, hidden: Tensor, routes: Routes, num_experts: int, capacity: int | None = None
    ) -> tuple[Grouped, tuple[Permutation, int]]:
        """Return the copies for this rank's experts.

        The host waits for numbers of tokens and rows, but not if ``capacity`` fixes the rows and all ranks bring the
        same number of tokens.
        """
        group = self.shared.expert_group
        longest, most = len(hidden), capacity or 0
        if not self.shared.equal_tokens(self, len(hidden), hidden.device):
            longest, most = largest(group, hidden.device, longest, most)
        missing = (0, 0, 0, max(1, longest) - len(hidden))
        # All ranks must gather equal sizes, and some backends none that are empty: pad. Padding has no expert.
        everyone, probs = (all_gather(F.pad(x, missing), group) for x in (hidden, routes.probs))
        # The plain gather, without autograd: numbers of experts have no gradient.
        experts = start_all_gather(F.pad(routes.experts, missing, value=-1), group).wait()
        # experts of other ranks, and none, lie outside of [0, num_experts)
        experts = torch.where(experts < 0, -1, experts - self.shared.mesh.rank("ep") * num_experts)
        if capacity is not None:
            sizes = [aligned(most * group.size(), self.alignment)] * num_experts
            where = permutation(experts, num_experts, alignment=self.alignment, capacity=sizes[0])
        else:
            counts = torch.bincount(experts[(experts >= 0) & (experts < num_experts)], minlength=num_experts)
            sizes = [aligned(count, self.alignment) for count in counts.tolist()]
            where = permutation(experts, num_experts, alignment=self.alignment, rows=sum(sizes))
        tokens, weights = permute(everyone, where, probs)
        assert weights is not None
        return Grouped(tokens, weights, where.offsets, sizes), (where, len(hidden))

    def combine(self, outputs: Tensor, memo: tuple[Permutation, int]) -> Tensor:
        """Add up the outputs over ranks."""
        where, own = memo
        # Each rank has the terms of its experts for all tokens; the owner of a token gets their sum.
        return reduce_scatter(unpermute(outputs, where), self.shared.expert_group)[:own]


def largest(group: ProcessGroup, device: torch.device, *numbers: int) -> list[int]:
    """Return the largest value of each number among the ranks."""
    everyone = start_all_gather(torch.tensor([numbers], device=device), group).wait()
    found: list[int] = everyone.amax(0).tolist()
    return found
