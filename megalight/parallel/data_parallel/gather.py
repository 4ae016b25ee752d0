"""Parameter all-gather, bucket by bucket, under the update and the next forward; by NCCL or by copy engines."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from megalight.attachments import GATHER_HOOK
from megalight.parallel.data_parallel.buffers import Bucket, FlatParameters, all_gather
from megalight.parallel.data_parallel.communication import TransportChoice, side_stream
from megalight.parallel.data_parallel.fp8_parameters import FlatQuantized
from megalight.parallel.mesh import FAILED
from megalight.parallel.peers import driver, spin
from megalight.parallel.peers.memory import Flag, PeerMemory, PeerSlot
from megalight.parallel.peers.spin import PeerCopyStream, Watch


@dataclass(eq=False)
class _Buffer:
    """Memory of a bucket, with the same memory of the peers.

    Attributes:
        used: it holds values, so peers must learn when these are no longer needed.
        first: its first element in the memory.
    """

    memory: PeerMemory
    watch: Watch
    used: bool = False
    first: int = 0


class Pushes:
    """The buffers, and the copies into those of peers.

    Copies occupy no SM, so the computation beside them keeps all of them. The memory is symmetric
    (:mod:`megalight.parallel.peers`): buffers that units use in turn, or whole parameters. A rank may push into a
    buffer once its owner no longer computes with the unit that was there, or with the last values of the
    parameters. All ranks gather in the same order, so each wait is for something that the peer has queued before
    its own wait.

    Args:
        device: of the buffers.
        choice: decides which groups of ranks have buffers.

    Attributes:
        without: why some groups that were asked for have none.
    """

    def __init__(self, device: torch.device, choice: TransportChoice) -> None:
        self.without: list[str] = []
        self._device, self._choice = device, choice
        self._copies = PeerCopyStream()
        self._buffers: dict[int, _Buffer] = {}
        # Copies may still be on their way when a run is dropped, and they must not meet memory that is gone.
        weakref.finalize(self, finish, device).atexit = False

    def room(self, numel: int, dtype: torch.dtype, group: ProcessGroup) -> Tensor | None:
        """Allocate a buffer ``[numel]`` for units. The ranks of the group call this together, and in the same order.

        Returns:
            None if collectives gather among these ranks.
        """
        if (reason := self._choice.why_not_over(group)) is not None:
            self.without.append(reason)
            return None
        made = PeerMemory(group, slots=1, exact=True)
        made.reserve(numel * dtype.itemsize)
        own = made.view(made.rank, 0, (numel,), dtype, 0)
        self._buffers[own.data_ptr()] = _Buffer(made, Watch(made))
        return own

    def rooms(self, sizes: Sequence[int], dtype: torch.dtype, group: ProcessGroup) -> list[Tensor] | None:
        """Allocate memory ``[size]`` for buckets that stay whole, zero at first. Ranks call this as :meth:`room`.

        Peers do not write there before the first :meth:`gather`.

        Args:
            sizes: multiples of :data:`.memory.BOUNDARY` bytes.

        Returns:
            None if collectives gather among these ranks.
        """
        if (reason := self._choice.why_not_over(group)) is not None:
            self.without.append(reason)
            return None
        # One meeting for all of them. They share flags, as one is gathered after the other.
        made = PeerMemory(group, slots=1, exact=True, free=False)
        made.reserve(sum(sizes) * dtype.itemsize)
        watch, found, first = Watch(made), list[Tensor](), 0
        for size in sizes:
            found.append(made.own(size, dtype, first))
            self._buffers[found[-1].data_ptr()] = _Buffer(made, watch, used=True, first=first)
            first += size
        return found

    def keep(self, buckets: Iterable[FlatParameters | FlatQuantized]) -> None:
        """Free the buffers in which none of these buckets lies. The ranks of their groups call this together."""
        used = {bucket.params.data_ptr() for bucket in buckets}
        leaving = {address: buffer for address, buffer in self._buffers.items() if address not in used}
        # Copies of this rank may be on their way into memory of peers, and copies of theirs into ours.
        finish(self._device)
        for group in {buffer.memory.group: None for buffer in leaving.values()}:
            dist.barrier(group)
        for address in leaving:
            del self._buffers[address]

    def gather(self, bucket: FlatParameters | FlatQuantized) -> bool:
        """Gather a bucket on the current stream, which waits until all shards are there.

        Returns:
            whether the bucket lies in one of the buffers; if not, nothing has happened.

        Raises:
            MegalightError: in an earlier call, a peer was missing.
        """
        buffer = self._buffers.get(bucket.params.data_ptr())
        if buffer is None:
            return False
        buffer.watch.check()
        slot, others, stream = PeerSlot(buffer.memory, 0), buffer.memory.others, torch.cuda.current_stream()
        if buffer.used:
            driver.raise_flags(stream, slot.flags_at(Flag.FREE, others))
        buffer.used = True
        spin.wait_with(buffer.watch, slot.flags(Flag.FREE, others), buffer.memory)
        own, first = bucket.own_params, bucket.kept[0]
        for to in others:
            driver.copy(stream, slot.view(to, tuple(own.shape), own.dtype, buffer.first + first), own)
            # Stream order makes the flag visible only after the data.
            driver.raise_flags(stream, slot.flags_at(Flag.READY, (to,)))
        place = bucket.params[slice(*bucket.kept)]
        if place.data_ptr() != own.data_ptr():  # whole parameters hold the shard itself
            driver.copy(stream, place, own)
        spin.wait_with(buffer.watch, slot.flags(Flag.READY, others), buffer.memory)
        return True


def finish(device: torch.device) -> None:
    """Wait for the copies of a run that is dropped."""
    # After an error the device may wait for peers that are gone.
    if device.type == "cuda" and not FAILED.is_set():
        torch.cuda.synchronize(device)


def gather(whole: Tensor, own: Tensor, group: ProcessGroup) -> dist.Work:
    """Start to all-gather every rank's ``own`` into ``whole``."""
    work: dist.Work = all_gather(*_sendable(whole, own), group=group, async_op=True)
    return work


def gather_on_current_stream(whole: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """All-gather every rank's ``own`` into ``whole``, in the order of the current stream."""
    all_gather(*_sendable(whole, own), group=group)


def _sendable(whole: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    # 8-bit values travel as bytes: backends do not know their dtype.
    return (whole, own) if whole.element_size() > 1 else (whole.view(torch.uint8), own.view(torch.uint8))


class Gatherer:
    """All-gathers the parameters of buckets in place, and keeps track of the buckets still in flight.

    On a GPU, an event marks the end of each bucket's gather. A CUDA graph may wait for it: at each replay, for the
    gather that was started last before it.

    Args:
        buckets: in the order in which the forward pass needs them.
        device: of the buckets.
        pushes: gathers by copy engines; None: collectives do.
    """

    def __init__(self, buckets: Sequence[Bucket], device: torch.device, pushes: Pushes | None = None) -> None:
        self.buckets = buckets
        self._pushes = pushes
        self._waits: dict[int, Callable[[], object]] = {}
        self._hooks: list[RemovableHandle] = []
        self._home = {id(info.parameter): index for index, bucket in enumerate(buckets) for info in bucket.infos}
        self._traveling = [index for index, bucket in enumerate(buckets) if bucket.shard_group is not None]
        self._number = {id(buckets[index]): index for index in self._traveling}
        self._sent: set[int] = set()
        # Urgent: a gather needs few SMs, but soon, and products beside it leave it none until they end.
        self._stream = side_stream(device, bool(self._traveling), urgent=True)
        self._marks: dict[int, torch.cuda.Event] = {}
        if self._stream is not None:
            for index in self._traveling:
                self._marks[index] = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
                # torch ignores a wait for an event without a record, and a recording would never wait.
                self._marks[index].record()
        self._keep()

    @property
    def traveling(self) -> list[Bucket]:
        """The buckets that several ranks share, in the order of the forward pass."""
        return [self.buckets[index] for index in self._traveling]

    @property
    def recorded(self) -> bool:
        """Whether a CUDA graph is being recorded."""
        return self._stream is not None and torch.cuda.is_current_stream_capturing()

    def send(self, bucket: Bucket) -> None:
        """Start gathering one bucket, whose parameters are updated before others; :meth:`start` leaves it out.

        Its ranks send the same buckets in the same order, and never while :attr:`recorded`.
        """
        index = self._number[id(bucket)]
        self._begin([index])
        self._sent.add(index)

    def start(self) -> None:
        """Start gathering every bucket that was not sent since the last start."""
        self._begin([index for index in self._traveling if index not in self._sent])
        self._sent.clear()

    def _begin(self, indices: Sequence[int]) -> None:
        if self._stream is None:
            for index in indices:
                bucket = self.buckets[index]
                assert bucket.shard_group is not None
                if self._pushed(bucket):
                    continue
                # In place: `own_params` is this rank's interval of `params`, so the
                # collective copies nothing on this rank.
                self._waits[index] = gather(bucket.params, bucket.own_params, bucket.shard_group).wait
            return
        with self._stream.after_computation():
            for index in indices:
                bucket, mark = self.buckets[index], self._marks[index]
                assert bucket.shard_group is not None
                if not self._pushed(bucket):
                    # On this stream itself, and not on one of NCCL's: where streams share a queue of the device, one
                    # that waits holds up others.
                    gather_on_current_stream(bucket.params, bucket.own_params, bucket.shard_group)
                mark.record()
                self._waits[index] = mark.wait

    def _pushed(self, bucket: Bucket) -> bool:
        return self._pushes is not None and self._pushes.gather(bucket)

    def settle(self, again: bool) -> None:
        """Wait for gathers that are on their way, before all parameters are sent.

        Args:
            again: those that were sent already are sent again, because their values may have changed since.
        """
        if again:
            self._sent.clear()
        self.wait([index for index in self._waits if index not in self._sent])

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let passes that are recorded inside wait for their parameters in each replay; :meth:`replay` follows."""
        before, self._waits = self._waits, {index: mark.wait for index, mark in self._marks.items()}
        try:
            yield
            self.wait()  # what no module has waited for: code behind the replay may read it
        finally:
            self._waits = before

    def replay(self) -> None:
        """Leave the waiting to a replay that follows. On a CPU recordings cannot wait, so wait here."""
        if self._stream is None:
            self.wait()
        self._waits.clear()

    def widen(self, bucket: Bucket, params: Tensor | None) -> None:
        """Turn a bucket's quantized values into parameters of their own dtype; see :meth:`Bucket.widen`."""
        self.wait()
        bucket.widen(params)
        self._keep()  # the parameters have other memory now

    def forget(self) -> None:
        """Free memory of copy engines in which no bucket lies any more. All ranks call this together."""
        if self._pushes is not None:
            self._pushes.keep(self.buckets)

    def wait(self, indices: Sequence[int] | None = None) -> None:
        """Wait for some buckets, or for all. On CUDA the current stream waits, not the host."""
        if self._waits:
            # All waits are popped: a second call for the same bucket costs nothing.
            for index in list(self._waits) if indices is None else indices:
                if index in self._waits:
                    self._waits.pop(index)()

    def buckets_of(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """Return the buckets that hold these parameters, in order; parameters in no bucket are ignored."""
        return sorted({self._home[id(p)] for p in parameters if id(p) in self._home})

    def attach(self, module: nn.Module) -> None:
        """Make every submodule wait, before it runs, for its own parameters and for those of its childless children.

        The children are included because a parent may read a child's weight without calling the child, as a fused loss
        does. On one rank nothing is ever in flight: no hook is set, and modules keep torch's fast call path.
        """
        for part in module.modules():
            near = [part, *(child for child in part.children() if next(child.children(), None) is None)]
            needed = self.buckets_of(p for each in near for p in each.parameters(recurse=False))
            if (before := GATHER_HOOK.get(part)) is not None:
                before.remove()  # the hook of an earlier engine
            if any(self.buckets[index].shard_group is not None for index in needed):
                self._hooks.append(GATHER_HOOK.set(part, part.register_forward_pre_hook(self._hook(needed))))

    def detach(self) -> None:
        """Wait for all buckets, and let modules wait no more. Their hooks would keep masters of an ended run alive."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _keep(self) -> None:
        if self._stream is not None:
            # A run that is dropped after a step leaves gathers on their way, which nobody waits for.
            self._stream.uses(self.buckets[index].params for index in self._marks)

    def _hook(self, indices: list[int]) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def wait(module: nn.Module, inputs: tuple[object, ...]) -> None:
            self.wait(indices)

        return wait
