"""Numbers that the host needs from the device, such as the rows of each expert."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCounts:
    """Numbers ``[n]`` on their way from the device to the host, on the current stream."""

    def __init__(self, counts: Tensor) -> None:
        self._counts = counts
        self._done: torch.cuda.Event | None = None
        if counts.is_cuda:
            # Only a copy to pinned memory leaves the host free.
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self, *lengths: int) -> list[list[int]]:
        """Wait for the numbers, on the host, and return them in lists of these lengths."""
        if self._done is not None:
            # The host waits for this event, and not for the work that the stream was given since.
            self._done.synchronize()
        return [part.tolist() for part in torch.split(self._counts, list(lengths))]
