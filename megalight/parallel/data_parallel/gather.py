"""All-gather updated parameters to every data-parallel rank, bucket by bucket, during the next forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from megalight.imports import torch_distributed
from megalight.parallel.data_parallel.buffers import Bucket

all_gather = torch_distributed("all_gather_single", "all_gather_into_tensor")


def gather(whole: Tensor, own: Tensor, group: ProcessGroup) -> dist.Work:
    """Start to all-gather every rank's ``own`` into ``whole``."""
    if whole.element_size() == 1:  # 8-bit codes travel as bytes: backends do not know their dtype
        whole, own = whole.view(torch.uint8), own.view(torch.uint8)
    work: dist.Work = all_gather(whole, own, group=group, async_op=True)
    return work


class Gatherer:
    """All-gathers the parameters of buckets in place, and keeps track of the buckets still in flight.

    Args:
        buckets: in the order in which the forward pass needs them.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self._waits: dict[int, Callable[[], object]] = {}
        self._home = {id(info.parameter): index for index, bucket in enumerate(buckets) for info in bucket.infos}

    def start(self) -> None:
        """Start gathering every bucket."""
        for index, bucket in enumerate(self.buckets):
            if bucket.shard_group is not None:
                # In place: `own_params` is this rank's interval of `params`, so the
                # collective copies nothing on this rank.
                self._waits[index] = gather(bucket.params, bucket.own_params, bucket.shard_group).wait

    def widen(self, bucket: Bucket, params: Tensor | None) -> None:
        """Turn a bucket's codes into parameters of their own dtype; see :meth:`Bucket.widen`."""
        self.wait()
        group = bucket.shard_group
        bucket.widen(lambda whole, own: group is not None and gather(whole, own, group).wait(), params)

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
            if isinstance(before := part.__dict__.get("gathering"), RemovableHandle):
                before.remove()  # the hook of an earlier engine
            if any(self.buckets[index].shard_group is not None for index in needed):
                part.__dict__["gathering"] = part.register_forward_pre_hook(self._hook(needed))

    def _hook(self, indices: list[int]) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def wait(module: nn.Module, inputs: tuple[object, ...]) -> None:
            self.wait(indices)

        return wait


def join_replicas(buckets: Sequence[Bucket]) -> None:
    """Bring the parts of each shard that its replicas have updated to all of them. The current stream waits."""
    groups = [(b, b.replica_group) for b in buckets if b.divides_replicas]
    for work in [gather(b.own_params, b.updated, group) for b, group in groups if group is not None]:
        work.wait()


@torch.no_grad()
def masters_to_parameters(buckets: Sequence[Bucket]) -> None:
    """Round this rank's masters on the device into its interval of the parameters."""
    here = [bucket for bucket in buckets if not bucket.on_host]
    _copy([b.updated for b in here if b.rounds_masters], _separate_masters(here))


@torch.no_grad()
def parameters_to_masters(buckets: Sequence[Bucket]) -> None:
    """Copy this rank's interval of the parameters into its masters."""
    _copy(_separate_masters(buckets), [b.updated for b in buckets if b.rounds_masters])


def _separate_masters(buckets: Sequence[Bucket]) -> list[Tensor]:
    return [bucket.shard.master for bucket in buckets if bucket.rounds_masters]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
