"""The pool of a router: the tokens over which its losses are means."""

from __future__ import annotations

from torch import Tensor

from megalight.types import PackedSequences


class Pool:
    """All tokens of a micro-batch are on this device. It can be replaced.

    The loss of a pool is a mean over its tokens. With its tokens on several devices, each device has one term, and the
    loss is the mean of the terms.
    """

    place = 0
    """The number of this device among those with different tokens."""

    @property
    def whole(self) -> bool:
        """Whether all tokens of a micro-batch are on this device."""
        return True

    def bounds(self, sequences: PackedSequences) -> Tensor:
        """``[n + 1]``: the start of each sequence among this device's tokens, and the end of the last."""
        return sequences.cu_seqlens

    def mask(self, sequences: PackedSequences) -> Tensor | None:
        """``[T]`` bool: False for this device's padding. None: it has none."""
        return sequences.token_mask

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of ``value`` over the devices that hold tokens of the micro-batch. It has no gradient."""
        return value.detach()

    def mean_of_replicas(self, value: Tensor) -> Tensor:
        """Return the mean of ``value`` over all devices with different tokens, of all replicas. It has no gradient."""
        return value.detach()
