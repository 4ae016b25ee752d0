"""Point-to-point messages: tensors in flight, as bytes, and texts from host to host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from megalight.parallel.trace import capturing


class Work(Protocol):
    """A part of a message in flight; :class:`torch.distributed.Work` is one."""

    def wait(self) -> object:
        """Wait; on a GPU the current stream waits, not the host."""

    def is_completed(self) -> bool:
        """Whether it is known to be done. gloo knows this only after :meth:`wait`."""


@dataclass(frozen=True)
class Message:
    """Tensors in flight, kept alive until they have arrived."""

    tensors: list[Tensor]
    works: Sequence[Work]

    def wait(self) -> list[Tensor]:
        """Wait, and return the tensors; on a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.tensors

    def done(self) -> bool:
        """Whether the tensors have arrived, without waiting; always False while a CUDA graph is captured."""
        return not capturing() and all(work.is_completed() for work in self.works)


def start(
    kind: Callable[..., dist.Work | None], parts: Sequence[tuple[int, Tensor]], group: ProcessGroup | None
) -> Message:
    """Start to send or receive contiguous tensors, each with the global rank of its peer.

    Args:
        kind: ``dist.isend`` or ``dist.irecv``.
    """
    # Backends do not send empty tensors; both sides leave out the same ones, so their messages still pair up.
    operations = [P2POp(kind, as_bytes(part), peer, group) for peer, part in parts if part.numel()]
    # Together, so that one peer does not wait for another; NCCL sends all tensors in one kernel.
    return Message([part for _, part in parts], dist.batch_isend_irecv(operations) if operations else [])


def send_text(text: bytes, peers: Sequence[int], group: ProcessGroup) -> Message:
    """Start to send a few bytes to the hosts of global ranks, over gloo."""
    # A `bytearray`, because torch warns of memory that cannot be written.
    tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    # The receiver cannot know the length of the text, so it comes first.
    return start(dist.isend, [(peer, part) for peer in peers for part in (torch.tensor([len(text)]), tensor)], group)


def receive_text(peer: int, group: ProcessGroup) -> bytes:
    """Wait for the bytes of :func:`send_text`."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(as_bytes(length), peer, group=group)
    text = torch.empty(int(length), dtype=torch.uint8)
    # Messages between the same two ranks arrive in the order in which they were sent.
    dist.recv(text, peer, group=group)
    return text.numpy().tobytes()


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, so that the backend need not support its dtype."""
    return tensor.view(-1).view(torch.uint8)
