"""The exchange of rows between ranks: an all-to-all with numbers of rows that differ from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.ops.common import apply, once_differentiable


def exchange(x: Tensor, group: ProcessGroup | None, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Send the first ``send[0]`` rows to rank 0, the next ``send[1]`` to rank 1, and so on.

    Returns:
        the rows from rank 0, then those from rank 1, and so on. The backward sends gradients back.
    """
    if group is None:
        return x
    out: Tensor = apply(_Exchange, x, group, list(send), list(receive))
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, send: list[int], receive: list[int]) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return _all_to_all(x, group, send, receive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.group, ctx.receive, ctx.send), None, None, None


def _all_to_all(x: Tensor, group: ProcessGroup, send: list[int], receive: list[int]) -> Tensor:
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


class HostCounts:
    """Numbers ``[n]`` on their way from the device to the host, on the current stream."""

    def __init__(self, counts: Tensor) -> None:
        self._counts = counts
        self._done: torch.cuda.Event | None = None
        if counts.is_cuda:
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self, *lengths: int) -> list[list[int]]:
        """Wait for the numbers, on the host, and return them in lists of these lengths."""
        if self._done is not None:
            self._done.synchronize()
        return [part.tolist() for part in torch.split(self._counts, list(lengths))]
