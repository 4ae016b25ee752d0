"""Messages between neighbouring stages.

Every directed edge has two groups of its own, one for activations and one for gradients. Each group carries messages in
one direction only, in the order in which the receiver's schedule consumes them. So no message ever waits behind another
one, whatever both sides have posted early. With one communicator for all messages of a pipeline, they would run in one
stream, where an early receive blocks a send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.parallel.graphs.capturing import capturing
from megalight.parallel.groups import new_group, speaks
from megalight.parallel.mesh import ParallelMesh

MAX_CTAS = 2
"""Multiprocessors that one message may occupy.

A receive that is posted early waits on the GPU. With NCCL's default size, several of them leave no multiprocessor for
the computation that the other side waits for. (With four chunks per rank on four GPUs this was a deadlock.)
"""


@dataclass(frozen=True)
class Message:
    """Tensors in flight, kept alive until they have arrived."""

    tensors: list[Tensor]
    works: list[dist.Work]

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


@dataclass(frozen=True)
class Edges:
    """This rank's channels; None if there is no neighbour.

    Attributes:
        activations_in, activations_out: from the previous rank, to the next.
        gradients_in, gradients_out: from the next rank, to the previous.
    """

    activations_in: Channel | None = None
    activations_out: Channel | None = None
    gradients_in: Channel | None = None
    gradients_out: Channel | None = None

    @classmethod
    def between(cls, mesh: ParallelMesh, around: bool) -> Edges:
        """Create the channels of this rank along ``pp``. All ranks call it together.

        Args:
            around: the last rank also sends to the first one (there are several chunks per rank).
        """
        ranks = mesh.ranks("pp")
        here, size = mesh.rank("pp"), len(ranks)
        found: dict[str, Channel] = {}
        for first in range(size if around and size > 1 else size - 1):  # same order on all ranks, so neighbours meet
            second = (first + 1) % size
            if here in (first, second):
                # Gradients run against activations: this rank's outgoing activations are the edge of its incoming
                # gradients.
                side, peer = ("out", ranks[second]) if here == first else ("in", ranks[first])
                other = "in" if side == "out" else "out"
                ends = (ranks[first], ranks[second])
                found[f"activations_{side}"] = _channel(peer, ends, "activations")
                found[f"gradients_{other}"] = _channel(peer, ends, "gradients")
        return cls(**found)


def _channel(peer: int, ends: tuple[int, int], what: str) -> Channel:
    """Create one channel and send a first message, so that communicators are not created during a schedule."""
    purpose = f"{what} from {ends[0]} to {ends[1]}"
    # Sorted, so that both ends name the group in the same way.
    group = new_group(sorted(ends), purpose, max_ctas=MAX_CTAS)
    on_gpu = speaks("nccl", group=group)
    # The host reads these bytes. Over NCCL it would have to wait for the device.
    channel = Channel(peer, group, new_group(sorted(ends), purpose, backend="gloo") if on_gpu else group)
    token = torch.zeros(1, device="cuda" if on_gpu else "cpu")
    sends = (dist.get_rank() == ends[0]) == (what == "activations")
    (channel.send if sends else channel.receive)([token]).wait()
    return channel
