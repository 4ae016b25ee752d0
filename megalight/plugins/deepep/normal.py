"""The package's normal kernels (``deep_ep.Buffer``): a token travels once to each rank, and is copied there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.nn.moe import Grouped, aligned
from megalight.ops.common import apply, once_differentiable
from megalight.ops.permute import Permutation, permutation, permute, unpermute
from megalight.ops.router import Routes
from megalight.parallel.turns import taking_turns
from megalight.plugins.deepep.dispatcher import PACKAGE, PackageDispatcher, settle


@dataclass(eq=False)
class _Trip:
    """One exchange, from the dispatch to the end of the backward.

    Attributes:
        buffer: the package's buffer.
        handle: the package's description of who sends what to whom.
        experts: ``[R, k]``: the experts of each received row among those that are here; -1: it is elsewhere.
        sizes: the number of copies of each expert that is here.
    """

    buffer: Any
    handle: Any = None
    experts: Tensor | None = None
    sizes: list[int] | None = None


class DeepEPDispatcher(PackageDispatcher):
    """Dispatch by ``deep_ep.Buffer``. The host waits once, inside the package, for the number of rows."""

    name = "deepep"
    multiprocessors = 20
    calls: ClassVar[dict[str, tuple[str, ...]]] = {
        "Buffer": ("group", "num_nvl_bytes", "num_rdma_bytes"),
        "Buffer.set_num_sms": ("new_num_sms",),
        "Buffer.get_dispatch_config": ("num_ranks",),
        "Buffer.get_combine_config": ("num_ranks",),
        "Buffer.get_dispatch_layout": ("topk_idx", "num_experts"),
        "Buffer.dispatch": ("x", "handle", "topk_idx", "topk_weights", "async_finish"),
        "Buffer.combine": ("x", "handle", "topk_weights", "async_finish"),
    }

    @classmethod
    def why_not_size(cls, num_ranks: int) -> str | None:
        """Return why there are no kernels for a group of so many ranks. The package knows, and only when asked."""
        kind = PACKAGE.load(f"{PACKAGE.name}:Buffer")
        try:
            kind.get_dispatch_config(num_ranks), kind.get_combine_config(num_ranks)
        except AssertionError as error:
            return f"it has no kernels for ep x etp = {num_ranks} ranks ({error or 'not among its sizes'})"
        return None

    def dispatch(
        self, hidden: Tensor, routes: Routes, num_experts: int, capacity: int | None = None
    ) -> tuple[Grouped, tuple[_Trip, Permutation, torch.dtype]]:
        """Return the copies for this rank's experts."""
        rows, routes = self.prepared(hidden, routes, num_experts)
        trip = _Trip(_buffer(self.group, rows.shape[1], self.occupied))
        total = num_experts * self.group.size()
        received, weights = apply(_Dispatch, rows, routes.probs, routes.experts, total, trip)
        assert trip.experts is not None
        assert trip.sizes is not None
        # Rows came by rank; one may be for several experts here, so copies are made now.
        sizes = [aligned(count, self.alignment) for count in trip.sizes]
        where = permutation(trip.experts, num_experts, alignment=self.alignment, rows=sum(sizes))
        tokens, probs = permute(received, where, weights)
        assert probs is not None
        return Grouped(tokens, probs, where.offsets, sizes), (trip, where, hidden.dtype)

    def combine(self, outputs: Tensor, memo: tuple[_Trip, Permutation, torch.dtype]) -> Tensor:
        """Add up the outputs of this rank for each received row, then those of all ranks for each token."""
        # Added up over this rank's experts before the message: a row returns once, and not
        # once for each expert.
        trip, where, dtype = memo
        out: Tensor = apply(_Combine, unpermute(outputs, where).to(torch.bfloat16), trip)
        return out.to(dtype)


@lru_cache(maxsize=4)
def _buffer(group: ProcessGroup, width: int, multiprocessors: int) -> Any:
    """Make a buffer for rows of ``width``. All layers share it; all ranks of the group make it together."""
    kind = PACKAGE.load(f"{PACKAGE.name}:Buffer")
    kind.set_num_sms(multiprocessors)
    size, row = group.size(), width * torch.bfloat16.itemsize
    # The larger of both calls, as dispatch and combine use the same buffer.
    configs = kind.get_dispatch_config(size), kind.get_combine_config(size)
    near = max(config.get_nvl_buffer_size_hint(row, size) for config in configs)
    far = max(config.get_rdma_buffer_size_hint(row, size) for config in configs)
    return kind(group, near, far)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, experts: Tensor, total: int, trip: _Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        per_rank, per_node, per_expert, to_rank, _ = trip.buffer.get_dispatch_layout(experts, total)
        rows, trip.experts, weights, trip.sizes, trip.handle, event = trip.buffer.dispatch(
            x.contiguous(),
            topk_idx=experts,
            topk_weights=probs.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=to_rank,
            num_tokens_per_expert=per_expert,
            async_finish=taking_turns(),
        )
        settle(event)
        return rows, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_probs, event = ctx.trip.buffer.combine(
            grad.contiguous(),
            ctx.trip.handle,
            topk_weights=grad_weights.float().contiguous(),
            async_finish=taking_turns(),
        )
        settle(event)
        return grad_x, grad_probs, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        out, _, event = trip.buffer.combine(rows.contiguous(), trip.handle, async_finish=taking_turns())
        settle(event)
        found: Tensor = out
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # with a handle the package sends as before, and the host need not wait
        rows, *_, event = ctx.trip.buffer.dispatch(
            grad.contiguous(), handle=ctx.trip.handle, async_finish=taking_turns()
        )
        settle(event)
        return rows, None
