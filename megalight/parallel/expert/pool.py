"""The pool of a router whose micro-batch is divided over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from megalight.nn.moe import Pool
from megalight.parallel.collectives import own_slice
from megalight.types import PackedSequences

if TYPE_CHECKING:
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
