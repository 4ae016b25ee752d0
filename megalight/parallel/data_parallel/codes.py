"""Weights stored in 8 bits: each rank casts its part of the masters with the scale of the whole weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.ops.cast_flat import cast_flat
from megalight.ops.linear.low_precision import LowPrecision
from megalight.ops.parameter import precision_of
from megalight.ops.quantize import scales_of
from megalight.ops.quantize.formats import Format
from megalight.parallel.data_parallel.buffers import Bucket, ParamInfo

ALIGNMENT = 16
"""Alignment of each scale in bytes, as the matrix products require."""


def codes_of(info: ParamInfo, gathered: bool = False) -> Format | None:
    """Return the 8-bit format in which a parameter is stored; None: it keeps its own dtype.

    Args:
        gathered: whether ranks gather the parameter after each step, and could gather its codes.
    """
    precision = precision_of(info.parameter)
    if precision is None:
        return None
    wanted = gathered if precision.primary is None else precision.primary
    return precision.recipe.weight.format if wanted else None


class Codes:
    """The scales of all weights stored in 8 bits, and the cast from masters to codes.

    Args:
        buckets: the buckets that hold codes.
    """

    def __init__(self, buckets: Sequence[Bucket], device: torch.device) -> None:
        self.parts: list[tuple[int, Bucket, int, int]] = []
        """``(number of the weight, bucket, start, stop)``: the elements of a bucket that this rank casts."""
        self.weights: list[LowPrecision] = []
        self._divided: list[tuple[ProcessGroup, slice]] = []
        """Data-parallel groups with the slice of weights whose masters are divided over them."""
        holders: list[Bucket] = []
        for group in dict.fromkeys(bucket.shard_group for bucket in buckets):
            first = len(self.weights)
            for bucket in buckets:
                if bucket.shard_group is group:
                    self._add(bucket)
                    holders += [bucket] * len(bucket.infos)
            if group is not None:
                self._divided.append((group, slice(first, len(self.weights))))
        self.amax = torch.zeros(len(self.weights), device=device)
        # One scale per ALIGNMENT bytes: every view of a single scale is aligned.
        self.scales = torch.ones(len(self.weights), ALIGNMENT // 4, device=device)[:, 0]
        self._here = torch.tensor([number for number, *_ in self.parts], dtype=torch.long, device=device)
        agree: dict[int, tuple[Callable[[Tensor], None], list[int]]] = {}
        for number, precision in enumerate(self.weights):
            precision.scale = self.scales[number : number + 1].unsqueeze(1)
            # The parts of a weight that is split over tensor ranks share one scale. One
            # reduction serves all weights with the same ranks.
            if (reduce := precision.reduce_weight) is not None:
                agree.setdefault(id(reduce), (reduce, []))[1].append(number)
        # Asked for by nobody: so their values are those of a run that stores weights, rounded to their own dtype.
        kinds = {number: bucket.layout.kind.param_dtype for number, bucket in enumerate(holders)}
        rounded = {number: dtype for number, dtype in kinds.items() if self.weights[number].primary is None}
        self._rounded = rounded
        self._rounded_amax = [
            (dtype, torch.tensor([n for n, found in rounded.items() if found == dtype], device=device))
            for dtype in dict.fromkeys(rounded.values())
        ]
        self._agree = [(reduce, torch.tensor(numbers, device=device)) for reduce, numbers in agree.values()]

    def _add(self, bucket: Bucket) -> None:
        for info, slot in zip(bucket.infos, bucket.layout.slots, strict=True):
            low, high = max(bucket.shard.start, slot.start), min(bucket.shard.stop, slot.stop)
            if low < high:
                self.parts.append((len(self.weights), bucket, low, high))
            precision = precision_of(info.parameter)
            assert precision is not None
            self.weights.append(precision)

    @torch.no_grad()
    def cast(self) -> None:
        """Update this rank's codes, and all scales, from the masters; one all-reduce per data-parallel group."""
        if not self.weights:
            return
        self.amax.zero_()
        # Read anew each time: the masters may have moved to host memory and back.
        masters = [bucket.shard.part(*span) for _, bucket, *span in self.parts]
        if self.parts:
            largest = torch._foreach_norm(masters, float("inf"))
            # In float32: scales are, and the largest values of half-precision masters are exact there.
            self.amax[self._here] = torch.stack(largest).float()
        for dtype, numbers in self._rounded_amax:
            # Rounding keeps the order, so the largest rounded value is the rounded largest value.
            self.amax[numbers] = self.amax[numbers].to(dtype).float()
        for group, weights in self._divided:
            dist.all_reduce(self.amax[weights], dist.ReduceOp.MAX, group=group)
        for reduce, numbers in self._agree:
            among = self.amax[numbers]
            reduce(among)
            self.amax[numbers] = among
        first = self.weights[0]
        scheme, amax = first.recipe.weight, self.amax * 2.0**first.margin
        self.scales.copy_(scales_of(amax, scheme))
        for (number, bucket, low, high), master in zip(self.parts, masters, strict=True):
            # The scale comes from the amax of the whole weight. The part's own one
            # would give each rank another scale.
            own = bucket.own_params[low - bucket.kept[0] : high - bucket.kept[0]]
            cast_flat(own, master, scheme, amax[number], self._rounded.get(number, master.dtype))
