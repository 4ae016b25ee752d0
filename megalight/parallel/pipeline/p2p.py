"""Messages between neighbouring stages.

Every directed edge has two groups of its own, one for activations and one for gradients, and each carries messages in
one direction only, in the order in which the receiver's schedule consumes them. So nothing ever waits for a message
that lies behind another, whatever both sides have posted in advance: one communicator for all of a pipeline's messages
would run them in one stream, where a receive posted early blocks a send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.parallel.graphs.state import capturing
from megalight.parallel.groups import new_group
from megalight.parallel.mesh import ParallelMesh

MAX_CTAS = 2
"""Multiprocessors that one message may occupy. A receive posted early waits on the GPU: several of NCCL's own size
leave none for the computation that the other side waits for (with four chunks per rank on four GPUs nothing moved)."""


@dataclass(frozen=True)
class Message:
    """Tensors under way, kept alive until they have arrived."""

    tensors: list[Tensor]
    works: list[dist.Work]

    def wait(self) -> list[Tensor]:
        """The tensors; on a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.tensors

    def done(self) -> bool:
        """Whether they have arrived, without waiting; never said of messages that a graph records."""
        return not capturing() and all(work.is_completed() for work in self.works)


class Channel:
    """One direction between two ranks.

    Args:
        peer: global rank of the other end.
        group: the two ends.
        host_group: the same for messages that the host must read.
    """

    def __init__(self, peer: int, group: ProcessGroup, host_group: ProcessGroup) -> None:
        self.peer = peer
        self.group = group
        self.host_group = host_group

    def send(self, tensors: Sequence[Tensor]) -> Message:
        """Start sending."""
        return self._start(dist.isend, [tensor.detach().contiguous() for tensor in tensors])

    def receive(self, buffers: Sequence[Tensor]) -> Message:
        """Start receiving into ``buffers``."""
        return self._start(dist.irecv, list(buffers))

    def send_text(self, text: bytes) -> Message:
        """Start sending a few bytes to the other host. (Waiting here could wait for one that waits likewise.)"""
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
        full = [tensor for tensor in tensors if tensor.numel()]
        operations = [dist.P2POp(kind, tensor, self.peer, self.group) for tensor in full]
        return Message(tensors, dist.batch_isend_irecv(operations) if operations else [])


@dataclass(frozen=True)
class Edges:
    """This rank's channels; None where there is no neighbour.

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
        """The channels of this rank along ``pp``. All ranks call it together.

        Args:
            around: the last rank hands on to the first (there are several chunks per rank).
        """
        ranks = mesh.ranks("pp")
        here, size = mesh.rank("pp"), len(ranks)
        found: dict[str, Channel] = {}
        for first in range(size if around and size > 1 else size - 1):  # in one order on all: neighbours meet
            second = (first + 1) % size
            if here in (first, second):
                side, peer = ("out", ranks[second]) if here == first else ("in", ranks[first])
                other = "in" if side == "out" else "out"
                ends = (ranks[first], ranks[second])
                found[f"activations_{side}"] = _channel(peer, ends, "activations")
                found[f"gradients_{other}"] = _channel(peer, ends, "gradients")
        return cls(**found)


def _channel(peer: int, ends: tuple[int, int], what: str) -> Channel:
    """One channel, proven by a first message: communicators are made here, not in the midst of a schedule."""
    purpose = f"{what} from {ends[0]} to {ends[1]}"
    group = new_group(sorted(ends), purpose, max_ctas=MAX_CTAS)
    on_gpu = dist.get_backend(group) == "nccl"
    channel = Channel(peer, group, new_group(sorted(ends), purpose, backend="gloo") if on_gpu else group)
    token = torch.zeros(1, device="cuda" if on_gpu else "cpu")
    sends = (dist.get_rank() == ends[0]) == (what == "activations")
    (channel.send if sends else channel.receive)([token]).wait()
    return channel
