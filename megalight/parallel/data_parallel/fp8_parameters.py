"""Weights stored in 8 bits: each rank casts its part of the masters with the scale of the whole weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.ops.adam import QuantizedOutput
from megalight.ops.linear.low_precision import LowPrecision, precision_of
from megalight.ops.quantize import scales_of
from megalight.ops.quantized_weight import QuantizedWeight, stored_of
from megalight.parallel.data_parallel.buffers import Bucket
from megalight.parallel.data_parallel.layout import SHARD_ALIGNMENT, BucketKey, BucketLayout, ParamInfo, align

ALIGNMENT = 16
"""Alignment of each scale in bytes, as the matmuls require."""


class FP8Parameters:
    """The scales of all weights stored in 8 bits, and the cast from masters to quantized values.

    A scale by past steps is known before the weight is. Such a weight needs no pass over its masters to find its
    magnitude, no reduction over ranks, and may be cast as soon as it is updated. Its magnitude is found by the cast.

    Args:
        buckets: the buckets that hold quantized values.
    """

    def __init__(self, buckets: Sequence[Bucket], device: torch.device) -> None:
        self.parts: list[tuple[int, Bucket, int, int]] = []
        """``(number of the weight, bucket, start, stop)``: the elements of a bucket that this rank casts."""
        self.weights: list[LowPrecision] = []
        self._of: dict[int, slice] = {}
        """``id`` of a bucket -> its parts."""
        self._divided: list[tuple[ProcessGroup, slice]] = []
        """Data-parallel groups with the slice of weights whose masters are divided over them."""
        self._early: set[int] = set()
        """``id`` of the buckets that were cast since the last :meth:`cast`."""
        self._amax: Tensor | None = None
        """What scales cover, once they are written for the next :meth:`cast`."""
        holders: list[Bucket] = []
        for group in dict.fromkeys(bucket.shard_group for bucket in buckets):
            first = len(self.weights)
            for bucket in buckets:
                if bucket.shard_group is group:
                    self._add(bucket)
                    holders += [bucket] * len(bucket.infos)
            if group is not None:
                self._divided.append((group, slice(first, len(self.weights))))
        # One scale per ALIGNMENT bytes: every view of a single scale is aligned.
        self.scales = torch.ones(len(self.weights), ALIGNMENT // 4, device=device)[:, 0]
        self.largest = torch.zeros(len(self.weights), device=device)
        self._here = torch.tensor([number for number, *_ in self.parts], dtype=torch.long, device=device)
        agree: dict[int, tuple[Callable[[Tensor], None], list[int]]] = {}
        for number, precision in enumerate(self.weights):
            precision.scale = self.scales[number : number + 1].unsqueeze(1)
            precision.largest = self.largest[number]
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
        first = len(self.parts)
        for info, slot in zip(bucket.infos, bucket.layout.slots, strict=True):
            low, high = max(bucket.shard.start, slot.start), min(bucket.shard.stop, slot.stop)
            if low < high:
                self.parts.append((len(self.weights), bucket, low, high))
            precision = precision_of(info.parameter)
            assert precision is not None
            self.weights.append(precision)
        self._of[id(bucket)] = slice(first, len(self.parts))

    @torch.no_grad()
    def cast(self) -> None:
        """Quantize this rank's part, and update all scales, from the masters. What :meth:`cast_early` has cast stays.

        If a scale is that of the values now, there is one all-reduce per data-parallel group.
        """
        if not self.weights:
            return
        amax = self._begin() if self._amax is None else self._amax
        for key, parts in self._of.items():
            if key not in self._early:
                self._write(amax, parts)
        self.expire()

    @torch.no_grad()
    def cast_early(self, bucket: Bucket) -> bool:
        """Cast one bucket, whose masters have their new values; False: scales are not known yet."""
        if id(bucket) not in self._early and (parts := self.early(bucket)) is not None:
            for start, stop, quantized_out in parts:
                quantized_out.cast(bucket.shard.master.detach()[start:stop])
        return id(bucket) in self._early

    @torch.no_grad()
    def early(self, bucket: Bucket) -> list[tuple[int, int, QuantizedOutput]] | None:
        """Return how to cast a bucket's masters, ``(start, stop, output)`` for each weight: its caller does so.

        Returns:
            None if scales are not known before the values.
        """
        if self._amax is None:
            if any(precision.covers is None for precision in self.weights):
                return None
            self._amax = self._begin()
        self._early.add(id(bucket))
        amax, first, parts = self._amax, bucket.shard.start, self.parts[self._of[id(bucket)]]
        return [
            (low - first, high - first, self._quantized_out(amax, number, bucket, low, high))
            for number, _, low, high in parts
        ]

    def expire(self) -> None:
        """Forget what was cast early, for example because masters may have changed since."""
        self._early.clear()
        self._amax = None

    def _begin(self) -> Tensor:
        """Write all scales, and return what each of them covers."""
        past = [precision.covers for precision in self.weights]
        known = [value for value in past if value is not None]
        if len(known) == len(past):
            amax = torch.stack(known)
        else:
            amax = self._now()
            if known:  # some weights are new in this run
                amax = torch.stack([amax[n] if value is None else value for n, value in enumerate(past)])
        self.scales.copy_(scales_of(amax, self.weights[0].recipe.weight))
        self.largest.zero_()
        return amax

    def _now(self) -> Tensor:
        """Return what scales by the values now cover, of all weights."""
        amax = torch.zeros_like(self.largest)
        if self.parts:
            # Read each time: the masters may have moved to host memory and back.
            largest = torch._foreach_norm([bucket.shard.part(*span) for _, bucket, *span in self.parts], float("inf"))
            # In float32: scales are, and the largest values of half-precision masters are exact there.
            amax[self._here] = torch.stack(largest).float()
        for dtype, numbers in self._rounded_amax:
            # Rounding keeps the order, so the largest rounded value is the rounded largest value.
            amax[numbers] = amax[numbers].to(dtype).float()
        for group, weights in self._divided:
            dist.all_reduce(amax[weights], dist.ReduceOp.MAX, group=group)
        for reduce, numbers in self._agree:
            among = amax[numbers]
            reduce(among)
            amax[numbers] = among
        return amax * 2.0 ** self.weights[0].margin

    def _write(self, amax: Tensor, parts: slice) -> None:
        """Write the quantized values of some parts; ``amax``: what the scale of each weight covers."""
        for number, bucket, low, high in self.parts[parts]:
            self._quantized_out(amax, number, bucket, low, high).cast(bucket.shard.part(low, high))

    def _quantized_out(self, amax: Tensor, number: int, bucket: Bucket, low: int, high: int) -> QuantizedOutput:
        precision = self.weights[number]
        # The scale comes from the amax of the whole weight. The part's own one
        # would give each rank another scale.
        own = bucket.own_params[low - bucket.kept[0] : high - bucket.kept[0]]
        told = None if precision.history is None else precision.largest
        rounded = self._rounded.get(number, bucket.shard.master.dtype)
        return QuantizedOutput(own, precision.recipe.weight, amax[number], rounded, told)


PART_ALIGNMENT = 256
"""Alignment of quantized values and of scales in bytes, so that kernels may read any dtype there."""


class FlatQuantized:
    """One unit's quantized frozen weights and their scales, packed as bytes; each rank keeps an interval.

    It comes and goes as :class:`~megalight.parallel.data_parallel.buffers.FlatParameters` do. While it has no memory,
    reading a weight raises.

    Args:
        kind: what the weights have in common; ``param_dtype`` is uint8.
        infos: the weights, each with quantized values in memory of its own, which this takes away.
        group: the ranks that share them.

    Attributes:
        layout: ``numel`` counts bytes; there are no slots.
        params: ``[numel]`` bytes of all ranks, in memory shared with other units; set by :meth:`lend`.
        own_params: ``[numel / ranks]`` bytes that this rank keeps.
        kept: ``(start, stop)``, the bytes that :attr:`own_params` holds.
        shown: ``[numel]`` the bytes of which quantized values and scales are views now.
        is_quantized: False: these have no masters, and what whole memory holds may be kept.
    """

    is_quantized = False

    def __init__(self, kind: BucketKey, infos: Sequence[ParamInfo], group: ProcessGroup | None) -> None:
        self.infos = list(infos)
        self.unit_group = group
        self._weights: list[QuantizedWeight] = []
        self._places: list[dict[str, _Place]] = []
        size = 0
        for info in infos:
            quantized = stored_of(info.parameter)
            assert quantized is not None, "these weights are stored quantized"
            places = {}
            for name, part in quantized.parts().items():
                start = align(size, PART_ALIGNMENT)
                size = start + part.nbytes
                places[name] = _Place(start, size, part.dtype, part.shape)
            self._weights.append(quantized)
            self._places.append(places)
        self.layout = BucketLayout(kind, (), align(size, kind.parts * max(SHARD_ALIGNMENT, PART_ALIGNMENT)))
        self.kept = self.layout.interval(kind.place)
        whole = torch.zeros(self.layout.numel, dtype=torch.uint8, device=infos[0].parameter.device)
        for quantized, places in zip(self._weights, self._places, strict=True):
            for name, part in quantized.parts().items():
                # As bytes: in-place copies are not available for all 8-bit dtypes.
                place = places[name]
                whole[place.start : place.stop] = part.reshape(-1).view(torch.uint8)
        self.own_params = whole[slice(*self.kept)].clone()
        self.params = self.shown = self.own_params.new_empty(0)
        self.vacate()

    def lend(self, params: Tensor) -> None:
        """Set the memory that these share with other units."""
        self.params = params

    def addresses(self) -> dict[int, int]:
        """Return where the first quantized values of each weight, by its id, are."""
        first = self.params.data_ptr()
        starts = (next(iter(places.values())).start for places in self._places)
        return {id(info.parameter): first + start for info, start in zip(self.infos, starts, strict=True)}

    def show(self, flat: Tensor) -> None:
        """Let quantized values and scales be views of a flat tensor of bytes."""
        self.shown = flat
        for quantized, places in zip(self._weights, self._places, strict=True):
            quantized.place({name: place.of(flat) for name, place in places.items()})

    def vacate(self) -> None:
        """Take the memory of quantized values and scales away, until :meth:`show`."""
        self.shown = self.own_params.new_empty(0)
        for quantized in self._weights:
            quantized.place(None)


@dataclass(frozen=True)
class _Place:
    """The place of quantized values or scales: bytes ``[start, stop)``."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: torch.Size

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.dtype).view(self.shape)
