"""Messages between neighboring stages.

Every directed edge has two groups of its own, one for activations and one for gradients. Each group carries messages in
one direction only, in the order in which the receiver's schedule consumes them. So no message ever waits behind another
one, whatever both sides have posted early. With one communicator for all messages of a pipeline, they would run in one
stream, where an early receive blocks a send.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import LayoutError
from megalight.parallel.collectives import Message, receive_text, send_text, start
from megalight.parallel.mesh import ParallelMesh, new_group, uses_backend
from megalight.parallel.peers import memory, spin
from megalight.parallel.peers.memory import BOUNDARY, Flag, PeerMemory, PeerSlot
from megalight.parallel.peers.spin import PeerCopyStream, Watch
from megalight.parallel.pipeline.schedules import Messages
from megalight.parallel.pipeline.timeline import Expected
from megalight.parallel.trace import capturing, spanned
from megalight.types import Opaque

Carry: TypeAlias = dict[str, Tensor]


class CarryEntry(NamedTuple):
    """One tensor of a carry, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def buffer(self, device: torch.device) -> Tensor:
        """Allocate a tensor for the values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        wants = " with a gradient" if self.requires_grad else ""
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}{wants}"


Form: TypeAlias = tuple[CarryEntry, ...]
"""A carry without its values."""


class Forms:
    """A cache of forms on one end of a channel.

    Both ends see the same messages in the same order, so they store and drop the same forms.
    """

    def __init__(self, most: int = 1024) -> None:
        self.most = most
        self._known: dict[Hashable, Form] = {}

    def get(self, key: Hashable | None) -> Form | None:
        """Return the form stored under ``key``, or None."""
        return None if key is None else self._known.get(key)

    def put(self, key: Hashable | None, form: Form) -> None:
        """Store a form; drop the oldest one if there are too many. Without a key, nothing is stored."""
        if key is not None:
            # A dict drops its oldest entry first, on both ends alike, as both have stored in the same order.
            self._known[key] = form
            if len(self._known) > self.most:
                del self._known[next(iter(self._known))]


def form_of(carry: Mapping[str, Tensor]) -> Form:
    """Return the form of a carry, which its receiver must know in advance."""
    return tuple(CarryEntry(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in carry.items())


def encode(form: Form) -> bytes:
    """Encode a form as JSON."""
    # Only what a receiver needs to allocate a tensor and to ask for its gradient.
    rows = [(e.name, e.shape, str(e.dtype).removeprefix("torch."), e.requires_grad) for e in form]
    return json.dumps(rows).encode()


def decode(text: bytes) -> Form:
    """Decode a form written by :func:`encode`."""
    return tuple(CarryEntry(n, tuple(shape), getattr(torch, dtype), grad) for n, shape, dtype, grad in json.loads(text))


def signature(batch: Any) -> Hashable | None:
    """Return a hashable value with everything in a micro-batch that shapes can depend on.

    Micro-batches with equal signatures have carries of equal form. All ranks of a pipeline see the same micro-batches,
    so both ends of a channel know without a message whether they know the form. None if the batch holds objects whose
    parts cannot be read.
    """
    try:
        return _signature(batch)
    except TypeError:
        # An unknown type: the form is then sent with each message.
        return None


def _signature(value: Any) -> Hashable:
    # Shapes and dtypes alone: values differ between micro-batches and have no part in the form.
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    # By identity: what it holds has no part in the form.
    if isinstance(value, Opaque):
        return id(value)
    if isinstance(value, Mapping):
        return tuple((key, _signature(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_signature, value))
    if dataclasses.is_dataclass(value):
        return type(value), tuple(_signature(getattr(value, field.name)) for field in dataclasses.fields(value))
    raise TypeError(f"unknown parts: {type(value).__name__}")


log = logging.getLogger(__name__)

MAX_CTAS = 2
"""SMs that one message may occupy.

A receive that is posted early waits on the GPU. With NCCL's default size, several of them leave no SM for
the computation that the other side waits for. (With four chunks per rank on four GPUs this was a deadlock.)
"""


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
        return send_text(text, [self.peer], self.host_group)

    def receive_text(self) -> bytes:
        """Wait for the bytes of :meth:`send_text`."""
        return receive_text(self.peer, self.host_group)

    def _start(self, kind: Callable[..., dist.Work | None], tensors: list[Tensor]) -> Message:
        return start(kind, [(self.peer, tensor) for tensor in tensors], self.group)


class ReceiveQueue:
    """The messages that one channel receives in a step, in the order of use.

    Args:
        channel: the channel; None if no message is expected.
        expected: the messages.
        form: ``(chunk, micro_batch)`` -> the form of the message. It may ask the sender and wait for the answer.
        device: the device that receives.
    """

    def __init__(
        self,
        channel: Channel | None,
        expected: Iterable[Expected],
        form: Callable[[int, int], Form],
        device: torch.device,
    ) -> None:
        self.channel = channel
        self.expected = deque(expected)
        self.form = form
        self.device = device
        self._coming: deque[tuple[Form, Message]] = deque()

    def post(self, number: int) -> None:
        """Post the receives that may be posted before action ``number`` (see :mod:`.timeline`)."""
        # Strictly in order: a channel matches receives and sends by their order alone.
        while self.expected and number >= self.expected[0].before:
            assert self.channel is not None
            chunk, index, _ = self.expected.popleft()
            # This may wait for the sender's host, but not for long: `before` says that the form is on its way.
            form = self.form(chunk, index)
            self._coming.append((form, self.channel.receive([entry.buffer(self.device) for entry in form])))

    @spanned("receive")
    def take(self) -> tuple[Form, list[Tensor]]:
        """Wait for the next message; return its form and its tensors."""
        form, message = self._coming.popleft()
        return form, message.wait()


class NeighborSlots:
    """Slots of two neighbors, for messages in both directions.

    The sender pushes a message into a slot on the receiver, on a stream of its own. The receiver's stream waits for
    the flag when it needs the message, copies it out of the slot, and frees the slot
    (:mod:`megalight.parallel.peers`).

    A push waits until its slot is free, and may hold up everything else that its rank has queued. So there are as
    many slots as the timeline needs (``RankSchedule.slots``): a push waits only for work that began before it.

    They grow between runs of a schedule. Messages that do not fit go by collectives, so those of a first run do. Both
    ends see the same messages, so they decide alike.

    Args:
        group: the two ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.memory: PeerMemory | None = None
        self.watch: Watch | None = None
        self.open = False
        self._largest = 0
        self._replaced: list[tuple[PeerMemory, Watch | None]] = []
        """Kept for good: recorded graphs hold their addresses."""

    def prepare(self, slots: int) -> None:
        """Make room for the largest message so far. Both ends call this together, before a run.

        Args:
            slots: number of slots in each direction that the run needs.
        """
        # Nothing can be allocated in a capture, and the runs before it were of the same kind.
        if self._largest and not capturing():
            if self.memory is None or self.memory.slots < slots:
                if self.memory is not None:
                    self._replaced.append((self.memory, self.watch))
                self.memory = PeerMemory(self.group, slots)
                self.watch = Watch(self.memory)
            self.memory.reserve(self._largest)
        self.open = self.memory is not None and self.memory.slots >= slots

    def slot(self, number: int, nbytes: int) -> PeerSlot | None:
        """Return the slot of a message, or None if the message does not fit.

        Args:
            number: number of messages through slots before it, in its direction.

        Raises:
            MegalightError: the other rank is gone.
        """
        self._largest = max(self._largest, nbytes)
        if self.memory is None or self.watch is None or not self.open or nbytes > self.memory.capacity:
            return None
        self.watch.check()
        return PeerSlot(self.memory, number % self.memory.slots)


class PeerChannel(Channel):
    """A channel whose messages go through slots.

    Args:
        peer, group, host_group: as in :class:`Channel`.
        line: slots shared with the channel in the other direction.
    """

    def __init__(self, peer: int, group: ProcessGroup, host_group: ProcessGroup, line: NeighborSlots) -> None:
        super().__init__(peer, group, host_group)
        self.line = line
        self.copies = PeerCopyStream()
        self._number = 0

    def send(self, tensors: Sequence[Tensor]) -> Message:
        """Start to push tensors."""
        whole = [tensor.detach().contiguous() for tensor in tensors]
        if (slot := self._next(whole)) is None:
            return self._start(dist.isend, whole)
        (other,) = slot.memory.others
        self.copies.stream.wait_stream(torch.cuda.current_stream())  # they must be computed before they are copied
        self.copies.await_free(slot)
        self.copies.push(slot, other, *zip(slot_views(slot, other, whole), nonempty(whole), strict=True))
        return Message(whole, [PendingSend(self.copies.stream.record_event())])

    def receive(self, buffers: Sequence[Tensor]) -> Message:
        """Prepare to receive into ``buffers``. Nothing waits on the device before the message is used."""
        if (slot := self._next(buffers)) is None:
            return self._start(dist.irecv, list(buffers))
        return Message(list(buffers), [PendingReceive(self, slot, list(buffers))])

    def _next(self, tensors: Sequence[Tensor]) -> PeerSlot | None:
        *_, nbytes = offsets(tensors)
        slot = self.line.slot(self._number, nbytes) if nbytes else None
        self._number += slot is not None
        return slot


@dataclass(frozen=True)
class PendingSend:
    """A message on its way out."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """Let the current stream wait: then the memory of the message may be written again."""
        torch.cuda.current_stream().wait_event(self.event)

    def is_completed(self) -> bool:
        """Whether the copies are done."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class PendingReceive:
    """A message that a slot receives."""

    channel: PeerChannel
    slot: PeerSlot
    buffers: list[Tensor]

    def wait(self) -> None:
        """Let the current stream wait for the message, copy it out and free the slot."""
        memory, copies = self.slot.memory, self.channel.copies
        assert self.channel.line.watch is not None
        spin.wait_with(self.channel.line.watch, self.slot.flags(Flag.READY, memory.others), memory)
        for place, buffer in zip(slot_views(self.slot, memory.rank, self.buffers), nonempty(self.buffers), strict=True):
            # Out of the slot at once: activations are kept until their backward, and the slot is needed sooner.
            buffer.copy_(place)
        copies.free(self.slot)

    def is_completed(self) -> bool:
        """Return False: only :meth:`wait` knows, and it is called once."""
        return False


def nonempty(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that have elements; the others need no copy."""
    return [tensor for tensor in tensors if tensor.numel()]


def offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Return where each tensor with elements begins in a slot, in bytes, and then the bytes of all."""
    return [0, *accumulate(-(-tensor.nbytes // BOUNDARY) * BOUNDARY for tensor in nonempty(tensors))]


def slot_views(slot: PeerSlot, rank: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the places of tensors with elements in the slot of a rank."""
    pairs = zip(nonempty(tensors), offsets(tensors), strict=False)
    return [slot.view(rank, tuple(x.shape), x.dtype, start // x.itemsize) for x, start in pairs]


@dataclass(frozen=True)
class P2PCommunicator:
    """This rank's channels; None if there is no neighbor.

    Attributes:
        activations_in, activations_out: from the previous rank, to the next.
        gradients_in, gradients_out: from the next rank, to the previous.
        lines: slots that neighbors share, if copy engines carry the messages.
    """

    activations_in: Channel | None = None
    activations_out: Channel | None = None
    gradients_in: Channel | None = None
    gradients_out: Channel | None = None
    lines: list[NeighborSlots] = field(default_factory=list)

    @classmethod
    def between(cls, mesh: ParallelMesh, around: bool, messages: Messages = "auto") -> P2PCommunicator:
        """Create the channels of this rank along ``pp``. All ranks call it together.

        Args:
            around: the last rank also sends to the first one (there are several chunks per rank).
            messages: how they travel (:class:`~megalight.parallel.pipeline.schedules.PipelineOptions`).

        Raises:
            LayoutError: ``symmetric`` cannot serve two neighbors.
        """
        ranks = mesh.ranks("pp")
        here, size = mesh.rank("pp"), len(ranks)
        found: dict[str, Channel] = {}
        lines: list[NeighborSlots] = []
        for first in range(size if around and size > 1 else size - 1):  # same order on all ranks, so neighbors meet
            second = (first + 1) % size
            if here in (first, second):
                # Gradients run against activations: this rank's outgoing activations are the edge of its incoming
                # gradients.
                side, peer = ("out", ranks[second]) if here == first else ("in", ranks[first])
                other = "in" if side == "out" else "out"
                ends = (ranks[first], ranks[second])
                pair = {f"activations_{side}": _channel(peer, ends, "activations")}
                pair[f"gradients_{other}"] = _channel(peer, ends, "gradients")
                if (line := _line(pair[f"activations_{side}"], ends, messages)) is not None:
                    lines.append(line)
                    pair = {name: PeerChannel(peer, c.group, c.host_group, line) for name, c in pair.items()}
                found |= pair
        return cls(**found, lines=lines)

    def prepare(self, slots: int) -> None:
        """Make room for the messages of a run. All ranks call this together, before it.

        Args:
            slots: the slots that the run needs, :attr:`~megalight.parallel.pipeline.schedules.RankSchedule.slots`.
        """
        for line in self.lines:
            line.prepare(slots)


def _channel(peer: int, ends: tuple[int, int], what: str) -> Channel:
    """Create one channel and send a first message, so that communicators are not created during a schedule."""
    purpose = f"{what} from {ends[0]} to {ends[1]}"
    # Sorted, so that both ends name the group in the same way.
    group = new_group(sorted(ends), purpose, max_ctas=MAX_CTAS)
    on_gpu = uses_backend("nccl", group=group)
    # The host reads these bytes. Over NCCL it would have to wait for the device.
    channel = Channel(peer, group, new_group(sorted(ends), purpose, backend="gloo") if on_gpu else group)
    token = torch.zeros(1, device="cuda" if on_gpu else "cpu")
    sends = (dist.get_rank() == ends[0]) == (what == "activations")
    (channel.send if sends else channel.receive)([token]).wait()
    return channel


def _line(channel: Channel, ends: tuple[int, int], messages: Messages) -> NeighborSlots | None:
    """Return the slots of two neighbors, or None if collectives carry their messages."""
    if messages == "plain":
        return None
    reason = memory.why_not("cuda" if uses_backend("nccl", group=channel.group) else "cpu")
    # Both ends come to the same answer.
    reason = memory.unreachable(channel.group) if reason is None else reason
    if reason is None:
        return NeighborSlots(channel.group)
    if messages == "symmetric":
        raise LayoutError(
            f"pipeline.messages='symmetric' cannot serve ranks {ends[0]} and {ends[1]}: it {reason}. Set "
            "pipeline.messages='auto', which takes plain messages there."
        )
    log.debug("messages between ranks %d and %d are plain: symmetric memory %s", *ends, reason)
    return None
