"""Sharded parameters: masters that the optimizer updates, and parameters that follow on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megalight.ops.adam import QuantizedOutput
from megalight.parallel.data_parallel.buffers import Bucket, FlatParameters
from megalight.parallel.data_parallel.communication import side_stream
from megalight.parallel.data_parallel.fp8_parameters import FP8Parameters
from megalight.parallel.data_parallel.gather import Gatherer, Pushes, gather
from megalight.parallel.data_parallel.layout import BucketLayout
from megalight.parallel.data_parallel.unit_memory import RotatingBuffers
from megalight.parallel.data_parallel.unshard import Unsharder
from megalight.parallel.host_memory import host_memory
from megalight.parallel.trace import capturing, spanned


def offloaded(layouts: Sequence[BucketLayout], fraction: float) -> set[int]:
    """Return the indices of the buckets whose masters go to the host: the first ones that hold this share of them."""
    wanted, chosen = fraction * sum(layout.numel for layout in layouts), set[int]()
    for index, layout in enumerate(layouts):
        if wanted <= 0:
            break
        wanted -= layout.numel
        chosen.add(index)
    return chosen


class HostMasters:
    """The traffic between devices and the masters of some buckets, which are in pinned host memory.

    Copies in both directions have a stream each, so that they run beside each other and beside updates on the device.
    On a CPU the same copies are made at once.

    Args:
        buckets: those with ``on_host``.
        device: of their parameters and gradients.
    """

    def __init__(self, buckets: Sequence[Bucket], device: torch.device) -> None:
        self.buckets = buckets
        self._down, self._up = side_stream(device), side_stream(device)
        self._gradients: dict[Bucket, Tensor] = {}
        self._rounded: dict[Bucket, Tensor] = {}
        self._arrived: dict[Bucket, torch.cuda.Event] = {}
        self._scale: Tensor | None = None
        for bucket in buckets:
            own, master = bucket.updated, bucket.shard.master.detach()
            # Rounded here, so that fewer bytes travel, and no memory of the device is needed for the wide ones.
            self._rounded[bucket] = master if own.dtype == master.dtype else host_memory(own.shape, own.dtype, device)
        if self._up is not None:
            self._up.uses(bucket.own_params for bucket in buckets)
            use_cores()

    def begin(self, scale: Tensor | None = None) -> Tensor | None:
        """Start to bring the reduced gradients to the host; an optimizer will step on them.

        Args:
            scale: 0-dim tensor on the device, to bring as well; None: there is none.

        Returns:
            the scale in host memory, where it is as soon as one gradient is.
        """
        scale = None if scale is None or not self.buckets else self._bring(scale)
        for bucket in self.buckets:
            if (reduced := bucket.reduced) is None:
                continue  # the batch was skipped
            here = self._gradients.get(bucket)
            if here is None or here.dtype != reduced.dtype:
                here = self._gradients[bucket] = host_memory(reduced.shape, reduced.dtype, reduced.device)
            if self._down is None:
                here.copy_(reduced)
            else:
                # After the current stream: clipping may just have scaled the gradients.
                with self._down.after_computation():
                    here.copy_(reduced, non_blocking=True)
                    self._arrived[bucket] = self._down.stream.record_event()
            bucket.shard.master.grad = here
        return scale

    def _bring(self, scale: Tensor) -> Tensor:
        if self._down is None:
            return scale
        if self._scale is None or self._scale.dtype != scale.dtype:
            self._scale = host_memory(scale.shape, scale.dtype, scale.device)
        with self._down.after_computation():
            self._scale.copy_(scale, non_blocking=True)
        # The next line on this stream may come later: the memory of the scale must not be used again before.
        scale.record_stream(self._down.stream)
        return self._scale

    def arrive(self, bucket: Bucket) -> None:
        """Wait until the gradient of a bucket is here. It is the only wait of the host in a step."""
        if (event := self._arrived.pop(bucket, None)) is not None:
            event.synchronize()

    def arrive_all(self) -> None:
        """Wait for all gradients, for an optimizer that does not ask for them one by one."""
        for bucket in self.buckets:
            self.arrive(bucket)

    def rounded(self, bucket: Bucket) -> Tensor | None:
        """Return where an optimizer may write the new parameters in their own dtype; None: masters have that dtype."""
        target = self._rounded[bucket]
        return None if target.dtype == bucket.shard.master.dtype else target

    def send(self, bucket: Bucket) -> None:
        """Start to copy the new parameters of a bucket to the device; :meth:`rounded` holds them already."""
        # The host may write there again only in the next step, after gradients that came later than this copy.
        if self._up is None:
            bucket.updated.copy_(self._rounded[bucket])
        else:
            # It waits for no stream: a gradient that the host has was behind all that read the old parameters. So it
            # runs beside updates on the device.
            with torch.cuda.stream(self._up.stream):
                bucket.updated.copy_(self._rounded[bucket], non_blocking=True)

    @torch.no_grad()
    def send_all(self) -> None:
        """Round all masters, and start to copy them to the device."""
        if self._up is not None:
            self._up.stream.synchronize()  # an earlier copy may still read what is overwritten here
            # No gradient came, so the device may still read the old parameters.
            self._up.stream.wait_stream(torch.cuda.current_stream(self._up.device))
        for bucket in self.buckets:
            if (target := self.rounded(bucket)) is not None:
                target.copy_(bucket.shard.master)
            self.send(bucket)

    def join(self) -> None:
        """Let the current stream wait for parameters on their way to the device."""
        if self._up is not None:
            self._up.join()

    def nbytes(self) -> int:
        """Return the bytes of host memory for masters and for copies on their way; optimizers have their own."""
        tensors = [bucket.shard.master for bucket in self.buckets]
        tensors += [*self._gradients.values(), *self._rounded.values()]
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def use_cores() -> None:
    """Give updates on the host this process's share of the cores: launchers often leave each process one thread."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
    share = len(os.sched_getaffinity(0)) // max(processes, 1)
    if share > torch.get_num_threads():
        torch.set_num_threads(share)


class HostBackup:
    """Copies of this rank's parameters in host memory, in their own dtype.

    Masters are divided over ranks, so a rank cannot make the parameters from its own part. After an error in one rank
    the others may never come to a collective. Then this is the only way back.

    Args:
        buckets: the parameters. Their memory must stay the same.
        scales: scales of parameters that are quantized.
        unsharder: the parameters of units; None: all parameters are always whole.
    """

    def __init__(self, buckets: Sequence[Bucket], scales: Tensor, unsharder: Unsharder | None) -> None:
        self._unsharder = unsharder
        held = [scales]
        for bucket in buckets:
            held.append(bucket.own_params if bucket.shards_params else bucket.params)
            if unsharder is not None and unsharder.whole and bucket.shards_params:
                held.append(bucket.shown)
        self._copies = [(here, host_memory(here.shape, here.dtype, here.device).copy_(here)) for here in held]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the parameters the values that were set aside. Nothing waits for another rank."""
        for here, copy in self._copies:
            here.copy_(copy)
        if self._unsharder is not None and not self._unsharder.whole:
            # Units that are gathered have the other values.
            self._unsharder.forget()


class ShardedParameters:
    """Parameters in the buckets' buffers: copies of masters, or their quantized values, all-gathered over ranks.

    Args:
        buckets: last parameters of the model first.
        overlap: let gathering continue after :meth:`publish` returns.
        host: the masters in host memory.
        pushes: gathers whole parameters by copy engines; None: collectives do.

    Attributes:
        written: an optimizer has already rounded its masters into ``bucket.own_params``.
        waited_by_modules: :meth:`attach_gather_hooks` was called.
        unsharder: the parameters of units; None: all parameters are always whole.
        gatherer: gathers parameters that stay whole.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        device: torch.device,
        overlap: bool,
        host: HostMasters,
        pushes: Pushes | None = None,
    ) -> None:
        self.buckets = buckets
        self.overlap = overlap
        self.host = host
        self.written = False
        self.waited_by_modules = False
        self.unsharder: Unsharder | None = None
        self._device = device
        # Buckets come in the order of the backward pass. The forward pass needs the last one first.
        self.gatherer = Gatherer([bucket for bucket in buckets[::-1] if not bucket.shards_params], device, pushes)
        self._fp8 = FP8Parameters(self._quantized(), device)
        self.recast()

    @spanned("gather_parameters")
    def publish(self) -> None:
        """Copy the masters into the parameters of every rank, or start to."""
        # An earlier gather must be finished, because it still reads and writes the parameters. What the optimizer has
        # sent since is on its way with the new values.
        self.gatherer.settle(again=not self.written)
        if self.unsharder is not None:
            self.unsharder.settle()
        if not self.written:
            self._fp8.expire()
            _masters_to_parameters(self.buckets)
            self.host.send_all()
        self.host.join()  # what comes from the host must be here before it is gathered
        # For one step only: the next values may come from another optimizer, or from a checkpoint.
        self.written = False
        # Quantization needs the scale of the whole weight, so ranks agree on scales before any of them sends its part.
        self._fp8.cast()
        _join_replicas(self.buckets)
        self.gatherer.start()
        if self.unsharder is not None:
            # The buffers of units still hold the values of the last step.
            self.unsharder.expire()
            self.unsharder.prefetch_first()
        if not self.overlap:
            self.sync()

    @property
    def sendable(self) -> list[Bucket]:
        """The buckets that :meth:`send` takes, in the order of the forward pass.

        The others wait for :meth:`publish`: replicas join parts of a shard, and values come from the host.
        """
        return [b for b in self.gatherer.traveling if not (b.divides_replicas or b.on_host)]

    def send(self, bucket: Bucket) -> None:
        """Start gathering the parameters of one bucket, which an optimizer has written; :meth:`publish` follows.

        Messages then run under the update of other buckets, and the first layers of the next step wait less. Quantized
        values whose scales depend on the new values wait for :meth:`publish`.
        """
        # A graph would hold the message without what waits for it.
        if self.gatherer.recorded or (bucket.is_quantized and not self._fp8.cast_early(bucket)):
            return
        self.gatherer.send(bucket)

    def quantized_out(self, bucket: Bucket) -> list[tuple[int, int, QuantizedOutput]] | None:
        """Return ``(start, stop, output)`` for each weight of a quantized bucket; an optimizer then writes it itself.

        Returns:
            None if scales follow from the new values; :meth:`publish` then casts the quantized values.
        """
        # A graph would hold the step without what follows from it here.
        return None if capturing() else self._fp8.early(bucket)

    def sync(self, homes: Sequence[int] | None = None) -> None:
        """Wait until parameters are up to date: all of them, or those of some buckets."""
        self.gatherer.wait(homes)
        # A wait for some buckets comes from one module's forward. Units wait in hooks of their own.
        if homes is None and self.unsharder is not None:
            self.unsharder.settle()

    def attach_gather_hooks(self, module: nn.Module) -> None:
        """Let each submodule wait for its parameters just before its forward, so that gathering overlaps.

        Only for models that read every parameter inside the forward of the module that owns it, or, if that module has
        no children, of its parent.
        """
        self.gatherer.attach(module)
        self.waited_by_modules = True

    def release_modules(self) -> None:
        """End :meth:`attach_gather_hooks`."""
        self.gatherer.detach()
        self.waited_by_modules = False

    def recast(self) -> None:
        """Call :meth:`publish` if parameters are quantized, after something else than the optimizer wrote masters."""
        if self._quantized():
            self.publish()

    def widen(self) -> None:
        """Give parameters that are quantized their own dtype again. Those of units stay sharded."""
        held = self._quantized()
        sharded = [bucket.layout for bucket in held if bucket.shards_params]
        if sharded and self.unsharder is not None:
            # What others wrote to whole parameters stays, and quantized values in flight arrive before their memory is
            # freed.
            self.unsharder.write_back()
            self.unsharder.forget()
        turns = () if self.unsharder is None else self.unsharder.turn_of
        memory = RotatingBuffers(sharded, turns, self._device)
        for bucket in held:
            dtype = bucket.layout.kind.param_dtype
            self.gatherer.widen(bucket, memory.take(bucket.layout, dtype) if bucket.shards_params else None)
        if held:
            self.gatherer.forget()
        self._fp8 = FP8Parameters((), self._device)
        if sharded and self.unsharder is not None:
            self.unsharder.guard()
            if self.unsharder.whole:
                self.unsharder.unshard_all()

    def host_backup(self) -> Callable[[], None]:
        """Return a function that gives the parameters the values that they have now, without other ranks.

        Call it after an error, when the masters have their values of now, too. Where these are divided over ranks, the
        parameters are copied to host memory: this rank's, once, in their own dtype.
        """
        self.sync()
        if any(bucket.state_groups for bucket in self.buckets):
            return HostBackup(self.buckets, self._fp8.scales, self.unsharder).put_back

        def from_masters() -> None:
            self.publish()
            self.sync()

        return from_masters

    def refresh_masters(self) -> None:
        """Copy the parameters into the masters; if parameters are quantized, cast them from the masters instead."""
        self.sync()
        if self.unsharder is not None:
            # Whole parameters lie in memory of their own while they may be written,
            # and masters are read from the shards.
            self.unsharder.write_back()
        _parameters_to_masters(self.buckets)
        _join_replicas(self.buckets)
        if self.unsharder is not None:
            # Other ranks have written their parts of the shards, too.
            self.unsharder.expire()
        self.recast()

    def _quantized(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.is_quantized]


@torch.no_grad()
def fill(buckets: Sequence[FlatParameters], name: str, values: Tensor) -> None:
    """Set this rank's part of one parameter, in its masters if it has any; names in no bucket are ignored."""
    for bucket in buckets:
        for info, slot in zip(bucket.infos, bucket.layout.slots, strict=True):
            if info.name == name:
                bucket.shard.fill(slot.start, values)


def _join_replicas(buckets: Sequence[Bucket]) -> None:
    """Bring the parts of each shard that its replicas have updated to all of them. The current stream waits."""
    groups = [(b, b.replica_group) for b in buckets if b.divides_replicas]
    for work in [gather(b.own_params, b.updated, group) for b, group in groups if group is not None]:
        work.wait()


@torch.no_grad()
def _masters_to_parameters(buckets: Sequence[Bucket]) -> None:
    """Round this rank's masters on the device into its interval of the parameters."""
    if rounding := [bucket for bucket in buckets if bucket.rounds_masters and not bucket.on_host]:
        torch._foreach_copy_([b.updated for b in rounding], [b.shard.master for b in rounding])


@torch.no_grad()
def _parameters_to_masters(buckets: Sequence[Bucket]) -> None:
    """Copy this rank's interval of the parameters into its masters."""
    if rounding := [bucket for bucket in buckets if bucket.rounds_masters]:
        torch._foreach_copy_([b.shard.master for b in rounding], [b.updated for b in rounding])
