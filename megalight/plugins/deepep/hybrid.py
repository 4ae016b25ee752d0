"""The package's hybrid kernels (``deep_ep.HybridEPBuffer``): exchange and copies by expert in one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.nn.moe import Grouped, aligned
from megalight.ops.common import apply, once_differentiable
from megalight.ops.permute import Permutation, permutation, permute, unpermute
from megalight.ops.router import Routes
from megalight.parallel.expert.all_to_all import experts_of
from megalight.parallel.expert.gather import largest
from megalight.plugins.deepep.dispatcher import PACKAGE, PackageDispatcher

FEWEST_TOKENS = 512
"""Smallest size of a buffer, in tokens of a rank. The package makes it larger when more come."""


@dataclass(eq=False)
class _Trip:
    """One exchange, from the dispatch to the end of the backward.

    Attributes:
        buffer: the package's buffer.
        num_experts: number of experts of each rank.
        handle: the package's description of who sends what to whom.
        sizes: ``[E]`` on the host, the number of copies of each expert that is here.
        rows: the number of all copies.
    """

    buffer: Any
    num_experts: int
    handle: Any = None
    sizes: Tensor | None = None
    rows: int = 0


class HybridEPDispatcher(PackageDispatcher):
    """Dispatch by ``deep_ep.HybridEPBuffer``. The host waits for the numbers of tokens and rows."""

    name = "hybridep"
    multiprocessors = 16
    calls: ClassVar[dict[str, tuple[str, ...]]] = {
        "HybridEPBuffer": (
            "group",
            "hidden_dim",
            "max_num_of_tokens_per_rank",
            "num_local_experts",
            "num_sms_dispatch_api",
            "num_sms_combine_api",
        ),
        "HybridEPBuffer.dispatch_with_permute": (
            "hidden",
            "routing_map",
            "probs",
            "num_of_experts_per_rank",
            "num_permuted_tokens",
            "handle",
        ),
        "HybridEPBuffer.combine_with_unpermute": ("hidden", "probs", "handle"),
    }

    def dispatch(
        self, hidden: Tensor, routes: Routes, num_experts: int, capacity: int | None = None
    ) -> tuple[Grouped, tuple[_Trip, Permutation | None, int, torch.dtype]]:
        """Return the copies for this rank's experts."""
        rows, routes = self.prepared(hidden, routes, num_experts)
        # The package gathers the maps of all ranks, which must have one size: pad with tokens that have no expert.
        (longest,) = largest(self.group, hidden.device, max(1, len(hidden)))
        missing = (0, 0, 0, longest - len(hidden))
        probs, chosen = _dense(routes, num_experts * self.group.size())
        trip = _Trip(_buffer(self.group, rows.shape[1], num_experts, self.occupied), num_experts)
        tokens, weights = apply(_Dispatch, F.pad(rows, missing), F.pad(probs, missing), F.pad(chosen, missing), trip)
        assert trip.sizes is not None
        sizes = trip.sizes.tolist()
        where = None
        if self.alignment > 1:
            # The package's rows follow each other without a gap: bring each expert's to a multiple.
            experts, sizes = (
                experts_of(trip.sizes[None].to(hidden.device), sum(sizes)),
                [aligned(n, self.alignment) for n in sizes],
            )
            where = permutation(experts, num_experts, alignment=self.alignment, rows=sum(sizes))
            tokens, weights = permute(tokens, where, weights.unsqueeze(1))
        offsets = torch.tensor(sizes).cumsum(0).to(hidden.device, torch.int32)
        return Grouped(tokens, weights, offsets, sizes), (trip, where, len(hidden), hidden.dtype)

    def combine(self, outputs: Tensor, memo: tuple[_Trip, Permutation | None, int, torch.dtype]) -> Tensor:
        """Add up the outputs of all ranks for each token."""
        trip, where, own, dtype = memo
        outputs = outputs if where is None else unpermute(outputs, where)
        out: Tensor = apply(_Combine, outputs.to(torch.bfloat16), trip)
        # The rows of padding come last.
        return out[:own].to(dtype)


def _dense(routes: Routes, total: int) -> tuple[Tensor, Tensor]:
    """``[T, E]``: the weight of each expert for each token, with gradient, and whether it is chosen."""
    count = len(routes.experts)
    column = torch.where(routes.experts < 0, total, routes.experts)  # one more column, for dropped ones
    probs = routes.probs.new_zeros(count, total + 1).scatter(1, column, routes.probs)
    chosen = torch.zeros(count, total + 1, dtype=torch.bool, device=column.device).scatter_(1, column, True)
    return probs[:, :total], chosen[:, :total]


# Buffers are large: layers of the same width share one, as their exchanges follow each other.
@lru_cache(maxsize=4)
def _buffer(group: ProcessGroup, width: int, num_experts: int, multiprocessors: int) -> Any:
    """Make a buffer for rows of ``width``. All layers share it; all ranks of the group make it together."""
    kind = PACKAGE.load(f"{PACKAGE.name}:HybridEPBuffer")
    return kind(
        group=group,
        hidden_dim=width,
        max_num_of_tokens_per_rank=FEWEST_TOKENS,
        num_local_experts=num_experts,
        num_sms_dispatch_api=multiprocessors,
        num_sms_combine_api=multiprocessors,
    )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, chosen: Tensor, trip: _Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        rows, weights, _, sizes, trip.handle = trip.buffer.dispatch_with_permute(
            hidden=x.contiguous(),
            routing_map=chosen.contiguous(),
            probs=probs.contiguous(),
            num_of_experts_per_rank=trip.num_experts,
        )
        trip.sizes, trip.rows = sizes.cpu().long(), len(rows)
        return rows, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_probs = ctx.trip.buffer.combine_with_unpermute(
            hidden=grad.contiguous(), probs=grad_weights.float().contiguous(), handle=ctx.trip.handle
        )
        return grad_x, grad_probs, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        out: Tensor = trip.buffer.combine_with_unpermute(hidden=rows.contiguous(), handle=trip.handle)[0]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # with a handle and the number of rows the host need not wait
        rows, *_ = ctx.trip.buffer.dispatch_with_permute(
            hidden=grad.contiguous(), handle=ctx.trip.handle, num_permuted_tokens=ctx.trip.rows
        )
        return rows, None
