"""Pinned host memory for values that a device writes and reads, and a pool that reuses it in stream order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory for values of a device: pinned for a GPU, which then copies without the host's help."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


FIT = 2
"""A block serves for values of half of its size, too. So micro-batches of other lengths need no memory of their own."""


class HostPool:
    """Blocks of pinned memory that a device writes and reads again and again.

    The host prepares a step while the device is still in the one before. Torch's own pool gives pinned memory out again
    only when the device has really made the copies, so a step that is prepared early pins as much memory once more.
    Here a block goes to its next user at once, with a function that lets a stream wait for the last copy.

    Args:
        device: where the copies are made.

    Attributes:
        pinned: bytes that were taken from the host so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = 0
        self._free: dict[int, deque[tuple[Tensor, Callable[[], None] | None]]] = {}

    def take(self, size: int) -> Tensor:
        """Return a block of at least ``size`` bytes. The current stream waits until nobody reads it any more."""
        fitting = [free for free, blocks in self._free.items() if blocks and size <= free <= FIT * size]
        if not fitting:
            self.pinned += size
            return host_memory((size,), torch.uint8, self.device)
        block, wait = self._free[min(fitting)].popleft()
        if wait is not None:
            wait()
        return block

    def give(self, block: Tensor, wait: Callable[[], None] | None) -> None:
        """Take a block back.

        Args:
            wait: lets the then current stream wait for the last copy; None on a CPU.
        """
        self._free.setdefault(block.numel(), deque()).append((block, wait))

    def clear(self) -> None:
        """Forget the blocks that nobody uses. Torch's own pool has them then."""
        self._free.clear()
