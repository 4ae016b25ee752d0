"""Frozen parameters of units: sharded in their own dtype, or quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megalight.ops.quantized_weight import stored_of
from megalight.parallel.data_parallel.buffers import Allocating, FlatParameters, Groups
from megalight.parallel.data_parallel.fp8_parameters import FlatQuantized, storage_format_of
from megalight.parallel.data_parallel.layout import BucketKey, BucketLayout, ParamInfo, plan_buckets
from megalight.parallel.data_parallel.unit_memory import Room, RotatingBuffers
from megalight.parallel.data_parallel.unshard import Unsharder

Store: TypeAlias = Callable[[nn.Parameter], None]
"""Stores a weight that has its values quantized."""

FROZEN = -1
"""In the place of the optimizer's group, for parameters in none."""


class FrozenShards:
    """Shards what units hold beside the parameters that are trained.

    Args:
        kinds: the frozen parameters of units, in registration order, and their kinds.
        groups: the process groups of each mesh and data axes.
        turns: the turn of each unit.
        allocating: a context in which the memory of messages is allocated.
        room: makes memory that peers fill; None: torch makes it.

    Attributes:
        buckets: parameters in their own dtype.
        quantized: those that are quantized.
        addresses: where each parameter, by its id, has its values or its quantized values.
    """

    def __init__(
        self,
        kinds: Mapping[ParamInfo, BucketKey],
        groups: Mapping[Any, Groups],
        turns: Sequence[int],
        allocating: Allocating,
        room: Room | None,
    ) -> None:
        # A kind of their own: they have no place in an optimizer, and must not lie in a bucket that has gradients.
        self._kinds = {info: replace(kind, group=FROZEN, divide_replicas=False) for info, kind in kinds.items()}
        self._groups, self._turns, self._room = groups, turns, room
        self._device = next((info.parameter.device for info in kinds), torch.device("cpu"))
        layouts, plain = self._layouts([info for info in kinds if stored_of(info.parameter) is None])
        memory = self._memory(layouts, allocating)
        self.buckets = [self._bucket(layout, plain, memory, allocating) for layout in layouts]
        # A second run over a model whose weights are quantized already.
        self.quantized = self._flat_quantized([info for info in kinds if stored_of(info.parameter) is not None])
        self._lend()

    @property
    def all(self) -> list[FlatParameters | FlatQuantized]:
        """Everything that is sharded."""
        return [*self.buckets, *self.quantized]

    def store(self, unsharder: Unsharder, wanted: Sequence[nn.Parameter], store: Store) -> None:
        """Replace weights by quantized values, one unit after the other, so that only one is whole at a time.

        All ranks call this together. The memory of the weights is freed, and that in which they were gathered: what
        stays plain gets other memory, which is as large as the rest of the largest unit.

        Args:
            wanted: some of the parameters.
            store: called with each weight while it has its values; stores it quantized.
        """
        assert not unsharder.whole, "units are gathered one after the other"
        weights = {id(weight) for weight in wanted}
        old: dict[int | None, list[FlatParameters]] = {}
        for bucket in self.buckets:
            old.setdefault(bucket.layout.kind.unit, []).append(bucket)
        infos = [info for info in self._kinds if stored_of(info.parameter) is None]
        layouts, rest = self._layouts([info for info in infos if id(info.parameter) not in weights])
        # Not among the buffers that NCCL knows: ranks would register them at different times.
        memory = self._memory(layouts, nullcontext)
        # In the order of registration, which is the same on all ranks that gather together.
        for unit in dict.fromkeys(self._kinds[info].unit for info in infos):
            assert unit is not None, "only parameters of units are sharded"
            unsharder.unshard(unit)
            chosen = [info for info in infos if id(info.parameter) in weights and self._kinds[info].unit == unit]
            for info in chosen:
                store(info.parameter)
            plain = [self._bucket(each, rest, memory, nullcontext) for each in layouts if each.kind.unit == unit]
            quantized = self._flat_quantized(chosen)
            # Taken out, so that their memory is freed on the way.
            leaving = old.pop(unit)
            unsharder.exchange(unit, leaving, [*plain, *quantized])
            self.buckets = [*(bucket for bucket in self.buckets if bucket not in leaving), *plain]
            self.quantized += quantized
        self._lend()
        unsharder.guard()

    def _layouts(self, infos: Sequence[ParamInfo]) -> tuple[list[BucketLayout], Sequence[ParamInfo]]:
        sizes, kinds = [info.parameter.numel() for info in infos], [self._kinds[info] for info in infos]
        return plan_buckets(sizes, kinds), infos

    def _memory(self, layouts: Sequence[BucketLayout], allocating: Allocating) -> RotatingBuffers:
        return RotatingBuffers(layouts, self._turns, self._device, allocating, self._room)

    def _bucket(
        self, layout: BucketLayout, infos: Sequence[ParamInfo], memory: RotatingBuffers, allocating: Allocating
    ) -> FlatParameters:
        groups, lent = self._groups[layout.kind.mesh, layout.kind.data], memory.take(layout, layout.kind.param_dtype)
        return FlatParameters(layout, infos, groups, True, lent, allocating=allocating)

    def _flat_quantized(self, infos: Sequence[ParamInfo]) -> list[FlatQuantized]:
        together: dict[BucketKey, list[ParamInfo]] = {}
        for info in infos:
            # Weights of all dtypes are bytes.
            together.setdefault(replace(self._kinds[info], param_dtype=torch.uint8), []).append(info)
        return [FlatQuantized(kind, each, self._groups[kind.mesh, kind.data].shards) for kind, each in together.items()]

    def _lend(self) -> None:
        """Give quantized values of units memory in turn, once all sizes are known, and note where everything is."""
        memory = self._memory([quantized.layout for quantized in self.quantized], nullcontext)
        for quantized in self.quantized:
            lent = memory.take(quantized.layout, torch.uint8)
            assert lent is not None, "quantized values belong to a unit"
            quantized.lend(lent)
        self.addresses = {key: place for held in self.all for key, place in held.addresses().items()}


def can_be_sharded(parameter: nn.Parameter) -> bool:
    """Return whether a frozen parameter is plain numbers, or quantized (:mod:`megalight.ops.quantized_weight`).

    Parameters that are quantized themselves (``primary_weights``), and types that pack several values, stay whole.
    """
    if stored_of(parameter) is not None:
        return True
    plain = type(parameter.data) is Tensor and parameter.is_floating_point() and parameter.element_size() > 1
    return plain and storage_format_of(parameter) is None
