"""The exchange of rows between ranks: an all-to-all with numbers of rows that differ from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.ops.common import apply, once_differentiable
from megalight.parallel.turns import pause, taking_turns


def exchange(
    tensors: Sequence[Tensor], group: ProcessGroup | None, send: Sequence[int], receive: Sequence[int]
) -> tuple[Tensor, ...]:
    """Of each tensor, send the first ``send[0]`` rows to rank 0, the next ``send[1]`` to rank 1, and so on.

    While the messages travel, another pass may compute (:mod:`megalight.parallel.turns`).

    Returns:
        for each tensor, the rows from rank 0, then those from rank 1, and so on. The backward sends gradients back.
    """
    if group is None:
        return tuple(tensors)
    found: tuple[Tensor, ...] = apply(_Exchange, group, list(send), list(receive), *tensors)
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, send: list[int], receive: list[int], *tensors: Tensor) -> Any:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return _all_to_all(tensors, group, send, receive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_all_to_all(grads, ctx.group, ctx.receive, ctx.send)


def _all_to_all(
    tensors: Sequence[Tensor], group: ProcessGroup, send: list[int], receive: list[int]
) -> tuple[Tensor, ...]:
    apart = taking_turns()
    # Collectives send memory as it lies, and slices or expanded gradients have gaps.
    inputs = [x.contiguous() for x in tensors]
    outs = tuple(x.new_empty((sum(receive), *x.shape[1:])) for x in tensors)
    works = [
        # Asynchronous only if another pass can run meanwhile.
        dist.all_to_all_single(out, x, receive, send, group=group, async_op=apart)
        for out, x in zip(outs, inputs, strict=True)
    ]
    if apart:
        pause()
        for work in works:
            work.wait()  # inputs live until here: their memory must not be used again while it is read
    return outs


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
