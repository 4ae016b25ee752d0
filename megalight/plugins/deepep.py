"""DeepEP (https://github.com/deepseek-ai/DeepEP): expert dispatch by kernels of its own, over NVLink and RDMA.

A token is sent once to each rank that has experts for it, instead of once for each expert. This module imports nothing
of the package; a dispatcher does when a model is split.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import ConfigurationError, LayoutError
from megalight.nn.moe import Grouped, aligned
from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.batch_invariant import refuse
from megalight.ops.permute import Permutation, permutation, permute, unpermute
from megalight.ops.router import Routes
from megalight.parallel.expert import DISPATCHERS
from megalight.parallel.expert.all_to_all import experts_of, spread
from megalight.parallel.expert.dispatch import ShardedDispatcher, largest
from megalight.parallel.interleaved_passes import interleaving, pause
from megalight.plugins.package import Package

if TYPE_CHECKING:
    from megalight.parallel.shared_state import SharedState


PACKAGE = Package("deep_ep", "deep_ep", "build https://github.com/deepseek-ai/DeepEP for your torch and CUDA")


class PackageDispatcher(ShardedDispatcher):
    """A dispatcher that calls the package.

    Attributes:
        name: the name of the dispatcher.
        num_sms: how many its messages occupy by default.
        calls: function of the package -> arguments that it must have. Releases have no reliable version numbers.

    Raises:
        LayoutError: the package cannot serve here.
    """

    name: ClassVar[str]
    num_sms: ClassVar[int]
    calls: ClassVar[Mapping[str, Sequence[str]]]
    pads = False

    def __init__(self, shared: SharedState) -> None:
        super().__init__(shared)
        if (reason := self.why_not(len(shared.mesh.ranks("ep", "etp")))) is not None:
            raise LayoutError(
                f"ExpertOptions: dispatcher={self.name!r} cannot serve: {reason}. Or set "
                "dispatcher='all_to_all', which needs no package."
            )

    @classmethod
    def why_not(cls, num_ranks: int) -> str | None:
        """Return why the package cannot serve a group of so many ranks on this machine, or None."""
        names = dict.fromkeys(path.partition(".")[0] for path in cls.calls)
        paths = [f"{PACKAGE.name}:{name}" for name in names]
        if (reason := PACKAGE.why_not("cuda", f"dispatcher {cls.name}", *paths)) is not None:
            return reason
        # By signatures: releases come from sources, and their versions say little.
        for path, wanted in cls.calls.items():
            owner, _, method = path.partition(".")
            found = inspect.signature(getattr(PACKAGE.load(f"{PACKAGE.name}:{owner}"), method or "__init__"))
            if lacking := [name for name in wanted if name not in found.parameters]:
                return f"{path} takes no {', '.join(lacking)} in this release. Next: {PACKAGE.how}"
        return cls.why_not_size(num_ranks)

    @classmethod
    def why_not_size(cls, num_ranks: int) -> str | None:
        """Return why the package cannot serve a group of so many ranks, or None. The package is there."""
        return None

    @property
    def group(self) -> ProcessGroup:
        """The ranks along ``ep`` and ``etp``."""
        return self.shared.expert_group

    @property
    def occupied(self) -> int:
        """Number of SMs for communication."""
        chosen = self.shared.expert.num_sms
        return self.num_sms if chosen is None else chosen

    def prepared(self, hidden: Tensor, routes: Routes, num_experts: int) -> tuple[Tensor, Routes]:
        """Return tokens and routes in the form that the package sends: bfloat16, and weights in float32.

        Raises:
            ConfigurationError: that would lose digits.
        """
        refuse("experts on several ranks")
        # The expert's product casts its input anyway; cast before the exchange, half as many bytes travel.
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        # Refused, and not cast without a word: the exchange would lose digits of the activations.
        if hidden.dtype != torch.bfloat16 or routes.probs.dtype == torch.float64:
            raise ConfigurationError(
                f"dispatcher={self.name!r} sends bfloat16 rows with float32 weights; here they are {hidden.dtype} and "
                f"{routes.probs.dtype}. Train in bfloat16 with moe.router.dtype=float32, or set "
                "dispatcher='all_to_all'."
            )
        # The package knows ranks and experts only: along `etp`, each expert is one of several.
        routes = spread(routes, num_experts, self.shared.mesh.etp)
        return hidden, Routes(routes.probs.float(), routes.experts)

    @abstractmethod
    def combine(self, outputs: Tensor, memo: Any) -> Tensor:
        """``[R, h] -> [T, h]``."""


def settle(event: Any) -> None:
    """Let the current stream wait for a message that has started; another pass may compute meanwhile."""
    # Without turns the package has waited itself, and there is no event.
    if interleaving():
        pause()
        event.current_stream_wait()


# Normal kernels (``deep_ep.Buffer``): a token is sent once to each rank, and copied there


@dataclass(eq=False)
class _NormalTrip:
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
    num_sms = 20
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
    ) -> tuple[Grouped, tuple[_NormalTrip, Permutation, torch.dtype]]:
        """Return the copies for this rank's experts."""
        rows, routes = self.prepared(hidden, routes, num_experts)
        trip = _NormalTrip(_normal_buffer(self.group, rows.shape[1], self.occupied))
        total = num_experts * self.group.size()
        received, weights = apply(_NormalDispatch, rows, routes.probs, routes.experts, total, trip)
        assert trip.experts is not None
        assert trip.sizes is not None
        # Rows came by rank; one may be for several experts here, so copies are made now.
        sizes = [aligned(count, self.alignment) for count in trip.sizes]
        where = permutation(trip.experts, num_experts, alignment=self.alignment, rows=sum(sizes))
        tokens, probs = permute(received, where, weights)
        assert probs is not None
        return Grouped(tokens, probs, where.offsets, sizes), (trip, where, hidden.dtype)

    def combine(self, outputs: Tensor, memo: tuple[_NormalTrip, Permutation, torch.dtype]) -> Tensor:
        """Add up the outputs of this rank for each received row, then those of all ranks for each token."""
        # Added up over this rank's experts before the message: a row returns once, and not
        # once for each expert.
        trip, where, dtype = memo
        out: Tensor = apply(_NormalCombine, unpermute(outputs, where).to(torch.bfloat16), trip)
        return out.to(dtype)


@lru_cache(maxsize=4)
def _normal_buffer(group: ProcessGroup, width: int, num_sms: int) -> Any:
    """Make a buffer for rows of ``width``. All layers share it; all ranks of the group make it together."""
    kind = PACKAGE.load(f"{PACKAGE.name}:Buffer")
    kind.set_num_sms(num_sms)
    size, row = group.size(), width * torch.bfloat16.itemsize
    # The larger of both calls, as dispatch and combine use the same buffer.
    configs = kind.get_dispatch_config(size), kind.get_combine_config(size)
    near = max(config.get_nvl_buffer_size_hint(row, size) for config in configs)
    far = max(config.get_rdma_buffer_size_hint(row, size) for config in configs)
    return kind(group, near, far)


class _NormalDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor, experts: Tensor, total: int, trip: _NormalTrip
    ) -> tuple[Tensor, Tensor]:
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
            async_finish=interleaving(),
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
            async_finish=interleaving(),
        )
        settle(event)
        return grad_x, grad_probs, None, None, None


class _NormalCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _NormalTrip) -> Tensor:
        ctx.trip = trip
        out, _, event = trip.buffer.combine(rows.contiguous(), trip.handle, async_finish=interleaving())
        settle(event)
        found: Tensor = out
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # with a handle the package sends as before, and the host need not wait
        rows, *_, event = ctx.trip.buffer.dispatch(
            grad.contiguous(), handle=ctx.trip.handle, async_finish=interleaving()
        )
        settle(event)
        return rows, None


# Hybrid kernels (``deep_ep.HybridEPBuffer``): exchange and copies by expert in one kernel


FEWEST_TOKENS = 512
"""Smallest size of a buffer, in tokens of a rank. The package makes it larger when more come."""


@dataclass(eq=False)
class _HybridTrip:
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
    num_sms = 16
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
    ) -> tuple[Grouped, tuple[_HybridTrip, Permutation | None, int, torch.dtype]]:
        """Return the copies for this rank's experts."""
        rows, routes = self.prepared(hidden, routes, num_experts)
        # The package gathers the maps of all ranks, which must have one size: pad with tokens that have no expert.
        (longest,) = largest(self.group, hidden.device, max(1, len(hidden)))
        missing = (0, 0, 0, longest - len(hidden))
        probs, chosen = _dense(routes, num_experts * self.group.size())
        trip = _HybridTrip(_hybrid_buffer(self.group, rows.shape[1], num_experts, self.occupied), num_experts)
        tokens, weights = apply(
            _HybridDispatch, F.pad(rows, missing), F.pad(probs, missing), F.pad(chosen, missing), trip
        )
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

    def combine(self, outputs: Tensor, memo: tuple[_HybridTrip, Permutation | None, int, torch.dtype]) -> Tensor:
        """Add up the outputs of all ranks for each token."""
        trip, where, own, dtype = memo
        outputs = outputs if where is None else unpermute(outputs, where)
        out: Tensor = apply(_HybridCombine, outputs.to(torch.bfloat16), trip)
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
def _hybrid_buffer(group: ProcessGroup, width: int, num_experts: int, num_sms: int) -> Any:
    """Make a buffer for rows of ``width``. All layers share it; all ranks of the group make it together."""
    kind = PACKAGE.load(f"{PACKAGE.name}:HybridEPBuffer")
    return kind(
        group=group,
        hidden_dim=width,
        max_num_of_tokens_per_rank=FEWEST_TOKENS,
        num_local_experts=num_experts,
        num_sms_dispatch_api=num_sms,
        num_sms_combine_api=num_sms,
    )


class _HybridDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, chosen: Tensor, trip: _HybridTrip) -> tuple[Tensor, Tensor]:
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


class _HybridCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _HybridTrip) -> Tensor:
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


def register() -> None:
    """Add the dispatchers."""
    DISPATCHERS.register("deepep")(DeepEPDispatcher)
    DISPATCHERS.register("hybridep")(HybridEPDispatcher)
