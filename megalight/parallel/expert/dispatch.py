"""MoE dispatch: its options, and the dispatcher by all-gather, which gives every rank all tokens of its group;
and the token pool of a router, over which balance losses are means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import LayoutError, MegalightError
from megalight.nn.moe import Dispatcher, Grouped, Pool, aligned
from megalight.ops.batch_invariant import refuse
from megalight.ops.permute import Permutation, permutation, permute, unpermute
from megalight.ops.router import Routes
from megalight.parallel.collectives import all_gather, own_slice, reduce_scatter, start_all_gather
from megalight.registry import Registry
from megalight.types import PackedSequences

if TYPE_CHECKING:
    from megalight.parallel.shared_state import SharedState


DISPATCHERS: Registry[Callable[[Any], Dispatcher]] = Registry("dispatcher")
"""Name -> function of the state that parallel layers share, which makes a dispatcher. Plugins can add more."""


@dataclass(frozen=True)
class ExpertOptions:
    """How copies of tokens get to their experts, if these are divided over ranks.

    Attributes:
        dispatcher: ``all_to_all`` sends each copy to the ranks of its expert; ``all_gather`` sends all tokens to all
            ranks, which is simple, and fast for few ranks and many experts per token; ``symmetric`` copies rows between
            GPUs of one host without occupying SMs; ``deepep`` and ``hybridep`` use
            the kernels of a package (:mod:`megalight.plugins.deepep`).
        equal_tokens: a promise that all ranks always bring the same number of tokens, as with batches of one shape.
            Then the host waits for nothing if ``moe.capacity.pad`` fixes the number of rows, and CUDA graphs can hold
            the experts. It need not be given where ``ep`` and ``etp`` lie within ``tp``. Not for ``deepep``
            and ``hybridep``.
        shared_expert_overlap: shared experts compute on a CUDA stream of their own, while copies of tokens travel.
            With ``all_to_all`` and ``symmetric``.
        num_sms: how many of a GPU the messages of ``deepep`` (None: 20) or ``hybridep`` (None: 16) occupy.

    Raises:
        LayoutError: there is no such dispatcher, or an option does not go with it.
    """

    dispatcher: str = "all_to_all"
    equal_tokens: bool = False
    shared_expert_overlap: bool = False
    num_sms: int | None = None

    def __post_init__(self) -> None:
        try:
            # Looked up now: a wrong name raises before any process group is made.
            DISPATCHERS[self.dispatcher]
        except MegalightError as error:
            raise LayoutError(f"ExpertOptions: {error}") from error
        if self.shared_expert_overlap and self.dispatcher not in ("all_to_all", "symmetric"):
            raise LayoutError(
                f"ExpertOptions: shared_expert_overlap=True with dispatcher={self.dispatcher!r}; only the messages of "
                "'all_to_all' and 'symmetric' leave the device free for other work. Set dispatcher='all_to_all', or "
                "leave shared_expert_overlap out."
            )
        if self.equal_tokens and self.dispatcher in ("deepep", "hybridep"):
            raise LayoutError(
                f"ExpertOptions: equal_tokens=True with dispatcher={self.dispatcher!r}, which counts rows itself. Set "
                "dispatcher='all_to_all', or leave equal_tokens out."
            )
        count = self.num_sms
        if count is not None and self.dispatcher not in ("deepep", "hybridep"):
            raise LayoutError(
                f"ExpertOptions: num_sms={count} with dispatcher={self.dispatcher!r}; only 'deepep' and "
                "'hybridep' can limit them. Leave num_sms out."
            )
        # The kernels work in pairs, one that sends and one that receives.
        if count is not None and (count < 2 or count % 2):
            raise LayoutError(f"ExpertOptions: num_sms={count}; it must be even, and at least 2.")


class ShardedDispatcher(Dispatcher):
    """Brings copies of tokens to experts on several ranks.

    Args:
        shared: the state that all parallel layers share.
    """

    def __init__(self, shared: SharedState) -> None:
        super().__init__()
        self.shared = shared

    def recorded(self) -> Dispatcher:
        """See :class:`Dispatcher`; all ranks bring the same number of tokens to it."""
        return RecordedDispatcher(self.shared, self.alignment)


@DISPATCHERS.register("all_gather")
class AllGatherDispatcher(ShardedDispatcher):
    """Gathers tokens and routes over ``ep`` and ``etp``, and reduce-scatters the outputs of this rank's experts.

    Ranks may have different numbers of tokens, also none, but all must call it at the same time. Memory and bytes grow
    with the size of the group.
    """

    def dispatch(
        self, hidden: Tensor, routes: Routes, num_experts: int, capacity: int | None = None
    ) -> tuple[Grouped, tuple[Permutation, int]]:
        """Return the copies for this rank's experts.

        The host waits for numbers of tokens and rows, but not if ``capacity`` fixes the rows and all ranks bring the
        same number of tokens.
        """
        refuse("experts on several ranks")
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


class RecordedDispatcher(ShardedDispatcher):
    """Gathers tokens and routes in one message, in passes that are recorded.

    All ranks must bring the same number of tokens. Each has rows for all copies that its experts might get, and no
    token is dropped. Few tokens travel by one-shot collectives, if the GPUs reach each other's memory.

    Args:
        alignment: see :class:`Dispatcher`.
    """

    def __init__(self, shared: SharedState, alignment: int) -> None:
        super().__init__(shared)
        self.alignment = alignment
        # Made now: in a recording, no memory could be exchanged.
        self._one_shot = shared.one_shot_experts

    def dispatch(
        self, hidden: Tensor, routes: Routes, num_experts: int, capacity: int | None = None
    ) -> tuple[Grouped, Permutation]:
        """Return the copies for this rank's experts. The host waits for nothing."""
        parts = routes.experts, routes.probs, hidden
        if self._one_shot is not None and self._one_shot.gathers(*parts):
            experts, probs, everyone = self._one_shot.all_gather(*parts)
        else:
            tokens = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
            gathered = start_all_gather(tokens, self.shared.expert_group).wait()
            found = torch.split(gathered, [part.shape[1] * part.itemsize for part in parts], 1)
            experts, probs, everyone = (x.contiguous().view(part.dtype) for x, part in zip(found, parts, strict=True))
        experts = experts - self.shared.mesh.rank("ep") * num_experts  # of none, it stays below 0
        room = aligned(len(everyone), self.alignment) if self.bounded else None
        where = permutation(experts, num_experts, alignment=self.alignment, capacity=room)
        rows, weights = permute(everyone, where, probs)
        assert weights is not None
        return Grouped(rows, weights, where.offsets, None if room is None else [room] * num_experts), where

    def combine(self, outputs: Tensor, memo: Permutation) -> Tensor:
        """Add up the outputs over ranks."""
        terms, few = unpermute(outputs, memo), self._one_shot
        if few is not None and few.takes(terms.numel() // few.ranks, terms.dtype):
            return few.reduce_scatter(terms)
        return reduce_scatter(terms, self.shared.expert_group)


def largest(group: ProcessGroup, device: torch.device, *numbers: int) -> list[int]:
    """Return the largest value of each number among the ranks."""
    everyone = start_all_gather(torch.tensor([numbers], device=device), group).wait()
    found: list[int] = everyone.amax(0).tolist()
    return found


class MeshPool(Pool):
    """Tokens of a micro-batch are divided over ``cp`` and, under sequence parallelism, over ``tp``.

    Args:
        shared: the state that all parallel layers share.
    """

    def __init__(self, shared: SharedState) -> None:
        self.shared = shared
        # Seeds the random logits of `force_balance`, which must differ between ranks.
        self.place = shared.mesh.global_rank

    @property
    def whole(self) -> bool:
        """Whether all tokens of a micro-batch are on this rank."""
        mesh = self.shared.mesh
        return mesh.cp == 1 and not (self.shared.sequence_parallel and mesh.tp > 1)

    def bounds(self, sequences: PackedSequences) -> Tensor:
        """Return the bounds within this rank's share along ``tp``; ``sequences`` are its share along ``cp`` alone."""
        if not self.shared.sequence_parallel:
            return sequences.cu_seqlens
        count = sequences.num_tokens // self.shared.mesh.tp
        # Bounds of sequences within the share; those that begin before or after it are clamped to its ends.
        return (sequences.cu_seqlens - self.shared.mesh.rank("tp") * count).clamp(0, count)

    def mask(self, sequences: PackedSequences) -> Tensor | None:
        """Return the mask of this rank's share along ``tp``."""
        mask = sequences.token_mask
        return own_slice(mask, self.shared.group) if mask is not None and self.shared.sequence_parallel else mask

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the ranks that hold tokens of the micro-batch."""
        return self._mean(value, "cp", "tp") if self.shared.sequence_parallel else self._mean(value, "cp")

    def mean_of_replicas(self, value: Tensor) -> Tensor:
        """Return the mean over the ranks that hold tokens of any micro-batch."""
        return self._mean(value, "dp", "cp", "tp") if self.shared.sequence_parallel else self._mean(value, "dp", "cp")

    def _mean(self, value: Tensor, *axes: str) -> Tensor:
        group = self.shared.mesh.group(*axes)
        # Detached: the mean steers the loss as a constant. Each rank differentiates its own tokens.
        total = value.detach().clone()
        if group is None:
            return total
        dist.all_reduce(total, group=group)
        return total / group.size()


NEXT_STEP = "Make batches of one shape, such as packed rows of a fixed length, or leave equal_tokens out."


class EqualTokens:
    """Knows whether all ranks along ``ep`` and ``etp`` bring the same number of tokens.

    They do if they are neighbors along ``tp``, whose shares of a sequence are equal, or if the user promises it
    (``ExpertOptions.equal_tokens``). A promise is checked in every pass, by the first layer that asks: its layers all
    see the same tokens. The host does not wait for the check, and a CUDA graph can hold it.

    Args:
        shared: the state that all parallel layers share.
    """

    def __init__(self, shared: SharedState) -> None:
        self.shared = shared
        mesh = shared.mesh
        within = set(mesh.ranks("ep", "etp")) <= set(mesh.ranks("tp"))
        self.holds = within or shared.expert.equal_tokens
        self._promised = not within and shared.expert.equal_tokens
        self._first: Dispatcher | None = None

    def __call__(self, dispatcher: Dispatcher, num_tokens: int, device: torch.device) -> bool:
        """Return whether other ranks bring ``num_tokens``, too. All ranks of the group call it together.

        Raises:
            LayoutError: the promise does not hold. On a GPU, an assertion on the device fails instead, and a later
                call of CUDA raises on every rank of the group.
        """
        if self._promised:
            if self._first is None:
                self._first = dispatcher
            # In each pass, and not once for each number: a rank that knows its number would not ask, and leave one with
            # a new number waiting for ever.
            if self._first is dispatcher:
                self._check(torch.full((1,), num_tokens, device=device))
        return self.holds

    def _check(self, own: Tensor) -> None:
        numbers = start_all_gather(own, self.shared.counts_group).wait()
        if own.is_cuda:
            # In stream order before the exchange, which would hang if sizes differ.
            torch._assert_async(
                (numbers == own).all(),
                f"ExpertOptions: equal_tokens=True, but ranks bring different numbers of tokens. {NEXT_STEP}",
            )
        elif len(set(numbers.tolist())) > 1:
            raise LayoutError(
                f"ExpertOptions: equal_tokens=True, but the ranks along ep and etp bring {numbers.tolist()} tokens. "
                f"{NEXT_STEP}"
            )
