"""Staging: what a rank will write, fixed at one moment. Writing it may come later, while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed import ProcessGroup

from megalight.checkpoint import tree
from megalight.checkpoint.files import checked_name
from megalight.checkpoint.manifest import FULLY_RESHARDABLE
from megalight.checkpoint.memory import host_memory
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.view import Box, View

Tree: TypeAlias = tuple[bytes, bytes | None]
"""JSON, and safetensors where there are tensors."""

ALIGNMENT = 16
"""Bytes; every dtype may begin there."""


@dataclass(frozen=True)
class Staged:
    """One rank's part of a checkpoint that is to be written.

    Attributes:
        views: what to write, by name.
        common: values of the whole run, on rank 0.
        rank_states: values of ranks that this one writes, by rank: its own, or those of a checkpoint that is rewritten.
        files: other files, on rank 0: contents, or where to copy from.
        scheme: by which the views were made.
    """

    views: Mapping[str, View]
    common: Tree | None
    rank_states: Mapping[int, Tree]
    files: Mapping[str, bytes | Path]
    scheme: str


def stage(
    views: Mapping[str, View],
    *,
    common: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    other_ranks: Mapping[int, Mapping[str, Any]] | None = None,
    files: Mapping[str, bytes | Path] | None = None,
    scheme: str = FULLY_RESHARDABLE,
    copy: bool = True,
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
            before they change.
        process_group: who saves; None means the default group, or this process alone.

    Raises:
        CheckpointError: on every rank, when any rank has a value that cannot be kept.
    """
    ranks = Ranks(process_group)
    common_tree: list[Tree] = []
    states = {**(other_ranks or {}), **({} if rank_state is None else {ranks.rank: rank_state})}
    trees: dict[int, Tree] = {}

    def encode() -> None:
        if ranks.rank == 0:
            common_tree.append(tree.dumps(dict(common or {}), "common"))
            for name in files or {}:
                checked_name(name)
        for rank, state in states.items():
            trees[rank] = tree.dumps(dict(state), "rank_state")

    ranks.together("preparing to save", encode)
    kept = dict(files or {}) if ranks.rank == 0 else {}
    fixed = _copied(views) if copy else views
    return Staged(fixed, common_tree[0] if common_tree else None, trees, kept, scheme)


def _copied(views: Mapping[str, View]) -> dict[str, View]:
    """The boxes that this rank writes, copied end to end into one piece of host memory."""
    written = [(name, box) for name, view in views.items() for box in view.boxes if box.write]
    sizes = [-(-box.data.nbytes // ALIGNMENT) * ALIGNMENT for _, box in written]
    memory = host_memory(sum(sizes))
    boxes: dict[str, list[Box]] = {}
    devices: set[torch.device] = set()
    start = 0
    for (name, box), size in zip(written, sizes, strict=True):
        copy = memory[start : start + box.data.nbytes].view(box.data.dtype).view(box.data.shape)
        copy.copy_(box.data, non_blocking=True)
        boxes.setdefault(name, []).append(Box(box.offset, copy))
        devices.add(box.data.device)
        start += size
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # the copies have arrived before anybody changes what they were of
    return {name: View(name, views[name].shape, found) for name, found in boxes.items()}
