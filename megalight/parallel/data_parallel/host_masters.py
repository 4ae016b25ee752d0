"""Masters in host memory: reduced gradients come to the host, updated parameters go back, bucket by bucket.

One optimizer step, if the optimizer asks before and after each bucket::

    device to host   grad 0 | grad 1 | grad 2 |
    host                    | update 0 | update 1 | update 2 |
    host to device                     | params 0 | params 1 | params 2
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from megalight.parallel.data_parallel.buffers import Bucket
from megalight.parallel.data_parallel.communication import side_stream
from megalight.parallel.data_parallel.layout import BucketLayout
from megalight.parallel.host_memory import host_memory


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
