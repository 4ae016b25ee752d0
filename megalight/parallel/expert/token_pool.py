"""The token pool of a router whose micro-batch is sharded over ranks: balance losses are means over all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.errors import LayoutError
from megalight.nn.moe import Pool
from megalight.parallel.collectives import own_slice, start_all_gather
from megalight.types import PackedSequences

if TYPE_CHECKING:
    from megalight.nn.moe import Dispatcher
    from megalight.parallel.tensor.shared import Shared


class MeshPool(Pool):
    """Tokens of a micro-batch are divided over ``cp`` and, under sequence parallelism, over ``tp``.

    Args:
        shared: the state that all parallel layers share.
    """

    def __init__(self, shared: Shared) -> None:
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

    def __init__(self, shared: Shared) -> None:
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
