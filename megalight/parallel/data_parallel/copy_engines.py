"""Which messages of the engine copy engines carry: parameters to peers, and terms of their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.parallel.data_parallel.buffers import Bucket, Groups
from megalight.parallel.data_parallel.communication import TransportChoice
from megalight.parallel.data_parallel.gather import Pushes
from megalight.parallel.data_parallel.layout import BucketLayout, Level
from megalight.parallel.data_parallel.reduce import PushedSums
from megalight.parallel.data_parallel.unit_memory import Room


class CopyEngines:
    """Decides what copy engines carry on this machine, and holds what carries it.

    Args:
        device: of the buffers.
        level: what is sharded. If it shards parameters, those outside of units are left to collectives.
        gathers: the way of parameters.
        reductions: the way of gradients. ``auto`` leaves those that no unit holds to collectives.

    Attributes:
        pushes: gathers parameters; None: collectives do.
        sums: sums gradients; None: collectives do.

    Raises:
        ConfigurationError: copy engines were asked for by name, and are not available.
    """

    def __init__(
        self, device: torch.device, level: Level, gathers: TransportChoice, reductions: TransportChoice
    ) -> None:
        self._gathers, self._reductions = gathers, reductions
        self._level = level
        summing = level.gradients or (level.state and reductions.way != "auto")
        self._no_sums = reductions.why_not(device) if summing else None
        self._no_pushes = gathers.why_not(device) if level.state else None
        self.sums = PushedSums(device) if summing and self._no_sums is None else None
        self.pushes = Pushes(device, gathers) if level.state and self._no_pushes is None else None

    def room(self, groups: Mapping[Any, Groups]) -> Room | None:
        """Return what makes buffers of units that peers fill, over the groups of each kind."""
        if self.pushes is None:
            return None
        pushes = self.pushes

        def make(layout: BucketLayout, numel: int, dtype: torch.dtype) -> Tensor | None:
            group = groups[layout.kind.mesh, layout.kind.data].shards
            assert group is not None, "a unit is sharded over several ranks"
            return pushes.room(numel, dtype, group)

        return make

    def whole(self, layouts: Sequence[BucketLayout], groups: Mapping[Any, Groups]) -> list[Tensor | None]:
        """Return memory for the parameters of each bucket that stays whole; None: it has memory of its own."""
        found: list[Tensor | None] = [None] * len(layouts)
        if self.pushes is None or self._level.parameters:
            return found
        together: dict[tuple[ProcessGroup, torch.dtype], list[int]] = {}
        for place, layout in enumerate(layouts):
            group = groups[layout.kind.mesh, layout.kind.data].shards
            if group is not None:
                together.setdefault((group, layout.kind.stored_dtype), []).append(place)
        for (group, dtype), places in together.items():
            rooms = self.pushes.rooms([layouts[place].numel for place in places], dtype, group)
            for place, room in zip(places, rooms or (), strict=rooms is not None):
                found[place] = room
        return found

    def serve(self, buckets: Sequence[Bucket], wire_dtype: torch.dtype | None) -> None:
        """Make room for the gradients of buckets; see :meth:`.PushedSums.serve`."""
        if self.sums is not None:
            self.sums.serve(buckets, wire_dtype, self._reductions)

    @property
    def reasons(self) -> dict[str, str]:
        """Option -> the way of its messages, and why; complete once all buffers are made."""
        found = {}
        for choice, nowhere, carrier in (
            (self._gathers, self._no_pushes, self.pushes),
            (self._reductions, self._no_sums, self.sums),
        ):
            if carrier is not None:
                found[choice.option] = choice.told(carrier.without)
            elif nowhere is not None and choice.way == "auto":
                found[choice.option] = choice.told([nowhere])
        return found
