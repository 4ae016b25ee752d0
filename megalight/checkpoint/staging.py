"""Staging: what a rank will write, fixed at one moment. Writing it may come later, while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.checkpoint import json_values
from megalight.checkpoint.disk.files import checked_name
from megalight.checkpoint.disk.manifest import FULLY_RESHARDABLE
from megalight.checkpoint.disk.part import Part, Piece
from megalight.checkpoint.memory import dtype_name, host_memory
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.view import Box, View

ALIGNMENT = 16
"""Bytes; every dtype may begin there."""

Allocate = Callable[[int], Tensor]
"""Gives that many bytes of host memory, as ``uint8``."""


@dataclass(frozen=True)
class Staged:
    """One rank's part of a checkpoint that is to be written.

    Attributes:
        views: what to write, by name.
        small: whole files by name: contents, or where to copy from.
        scheme: by which the views were made.
        world_size: ranks whose values are in it: of this group, or of the checkpoint that is rewritten.
    """

    views: Mapping[str, View]
    small: Mapping[str, bytes | Path]
    scheme: str
    world_size: int

    @property
    def boxes(self) -> list[tuple[View, Box]]:
        """The boxes that this rank writes, in order."""
        return [(view, box) for view in self.views.values() for box in view.boxes if box.write]

    def part(self, rank: int) -> Part:
        """The plan of what this rank writes.

        Raises:
            CheckpointError: tensors of a dtype that safetensors does not know.
        """
        pieces = (
            Piece(name, tuple(view.shape), dtype_name(view.dtype), box.offset, tuple(box.data.shape))
            for name, view in self.views.items()
            for box in view.boxes
            if box.write
        )
        return Part(rank, self.scheme, tuple(pieces), self.small)


def stage(
    views: Mapping[str, View],
    *,
    common: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    other_ranks: Mapping[int, Mapping[str, Any]] | None = None,
    files: Mapping[str, bytes | Path] | None = None,
    scheme: str = FULLY_RESHARDABLE,
    copy: bool | Allocate = True,
    process_group: ProcessGroup | None = None,
) -> Staged:
    """Collect what a save writes. All ranks of the group call it together.

    Args:
        views: this rank's views, by name.
        common: see :func:`megalight.checkpoint.save`.
        rank_state: see there.
        other_ranks: the same of ranks that are not here, because a checkpoint of theirs is rewritten.
        files: see there.
        scheme: see there.
        copy: copy the boxes that this rank writes to host memory, so that their owners may change them. False: write
            before they change. A function gives the memory.
        process_group: who saves; None means the default group, or this process alone.

    Raises:
        CheckpointError: on every rank, when any rank has a value that cannot be kept.
    """
    ranks = Ranks(process_group)
    # States of other ranks first: this rank's own replaces one of the same number.
    states = {**(other_ranks or {}), **({} if rank_state is None else {ranks.rank: rank_state})}

    staged: list[Staged] = []

    def collect() -> None:
        small: dict[str, bytes | Path] = {}
        # Whole files come from rank 0 only, as they are the same on all ranks.
        if ranks.rank == 0:
            small |= json_values.files("common", dict(common or {}), "common")
            for name, source in (files or {}).items():
                if copy and isinstance(source, Path):
                    source = source.read_bytes()  # it may have changed by the time it is written
                small[f"files/{checked_name(name)}"] = source
        for rank, state in states.items():
            small |= json_values.files(f"ranks/{rank}", dict(state), "rank_state")
        fixed = _copied(views, host_memory if copy is True else copy) if copy else views
        world_size = max(ranks.size, *(rank + 1 for rank in states), 1)
        staged.append(Staged(fixed, small, scheme, world_size))

    ranks.together("preparing to save", collect)
    return staged[0]


def _copied(views: Mapping[str, View], allocate: Allocate) -> dict[str, View]:
    """The boxes that this rank writes, copied end to end into one piece of host memory."""
    written = [(name, box) for name, view in views.items() for box in view.boxes if box.write]
    # Aligned, because each copy is viewed in its own dtype.
    sizes = [-(-box.data.nbytes // ALIGNMENT) * ALIGNMENT for _, box in written]
    memory = allocate(sum(sizes))
    boxes: dict[str, list[Box]] = {}
    devices: set[torch.device] = set()
    start = 0
    for (name, box), size in zip(written, sizes, strict=True):
        copy = memory[start : start + box.data.nbytes].view(box.data.dtype).view(box.data.shape)
        # Not waited for one by one: copies of all boxes are queued before the wait below.
        copy.copy_(box.data, non_blocking=True)
        boxes.setdefault(name, []).append(Box(box.offset, copy))
        devices.add(box.data.device)
        start += size
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # the copies have arrived before anybody changes what they were of
    return {name: View(name, views[name].shape, found) for name, found in boxes.items()}
