"""Messages between neighboring stages.

Every directed edge has two groups of its own, one for activations and one for gradients. Each group carries messages in
one direction only, in the order in which the receiver's schedule consumes them. So no message ever waits behind another
one, whatever both sides have posted early. With one communicator for all messages of a pipeline, they would run in one
stream, where an early receive blocks a send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.parallel.capturing import capturing

MAX_CTAS = 2
"""Multiprocessors that one message may occupy.

A receive that is posted early waits on the GPU. With NCCL's default size, several of them leave no multiprocessor for
the computation that the other side waits for. (With four chunks per rank on four GPUs this was a deadlock.)
"""


class Work(Protocol):
    """A part of a message in flight; :class:`torch.distributed.Work` is one."""

    def wait(self) -> object:
        """Wait; on a GPU the current stream waits, not the host."""

    def is_completed(self) -> bool:
        """Whether it is known to be done."""


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


class Channel:
    """One direction between two ranks.

    Args:
        peer: global rank of the other end.
        group: the two ends.
        host_group: the two ends, for messages that the host must read.
    """

    def __init__(self, peer: int, group: ProcessGroup, host_group: ProcessGroup) -> None:
        self.peer = peer
        self.group = group
        self.host_group = host_group

    def send(self, tensors: Sequence[Tensor]) -> Message:
        """Start to send tensors."""
        # The message has no part in autograd: the other end makes leaves of what it receives.
        return self._start(dist.isend, [tensor.detach().contiguous() for tensor in tensors])

    def receive(self, buffers: Sequence[Tensor]) -> Message:
        """Start to receive into ``buffers``."""
        return self._start(dist.irecv, list(buffers))

    def send_text(self, text: bytes) -> Message:
        """Start to send a few bytes to the other host, without a wait: both ends could wait for each other."""
        parts = [torch.tensor([len(text)]), torch.frombuffer(bytearray(text), dtype=torch.uint8)]
        works = [dist.isend(part, self.peer, group=self.host_group) for part in parts]
        return Message(parts, [work for work in works if work is not None])

    def receive_text(self) -> bytes:
        """Wait for the bytes of :meth:`send_text`."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, self.peer, group=self.host_group)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, self.peer, group=self.host_group)
        return text.numpy().tobytes()

    def _start(self, kind: Callable[..., dist.Work | None], tensors: list[Tensor]) -> Message:
        full = [tensor for tensor in tensors if tensor.numel()]  # backends do not send empty tensors
        # Batched: NCCL sends the tensors of one message in one kernel.
        operations = [dist.P2POp(kind, tensor, self.peer, self.group) for tensor in full]
        return Message(tensors, dist.batch_isend_irecv(operations) if operations else [])
