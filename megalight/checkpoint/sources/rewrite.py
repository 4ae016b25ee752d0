"""Rewrite a checkpoint in another format."""

from __future__ import annotations

import os
from collections.abc import Callable

from torch.distributed import ProcessGroup

from megalight.checkpoint.disk.manifest import DP_RESHARDABLE
from megalight.checkpoint.loading import open as open_checkpoint
from megalight.checkpoint.ranks import alone
from megalight.checkpoint.saving import save
from megalight.checkpoint.sources.flat import canonical
from megalight.checkpoint.view import View, views_of_source
from megalight.parallel.source import Source

WEIGHTS = "model."
"""Prefix of weights; names of optimizer state have others."""


def rewrite(
    path: str | os.PathLike[str], output: str | os.PathLike[str], scheme: str, watched: Callable[[Source], Source]
) -> None:
    """Write everything in a checkpoint again by another scheme. One process calls it.

    Weights, optimizer state, random states of all ranks and files are kept, so that a run resumes from the result as
    from the original. At most ``BUDGET`` bytes of :mod:`~megalight.checkpoint.sources.streaming`, or one tensor, are in
    memory at a time.

    Args:
        path: the checkpoint.
        output: the folder to write.
        scheme: the format to write. Flat state (``dp_reshardable``) is written for weights that are not split.
        watched: takes the source of all tensors, and returns one that reports what is read.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or ``output`` cannot be written.
    """
    opened = open_checkpoint(path)
    source = watched(canonical(opened))
    # All ranks that saved it, though one process writes: their random states must not be lost.
    states = {rank: opened.rank_state(rank) for rank in range(opened.world_size)}
    # One process of a larger run may call this, so it must not wait for the others.
    with alone() as group:
        save(
            output,
            _views(source, scheme, group),
            common=opened.common,
            other_ranks={rank: state for rank, state in states.items() if state is not None},
            files={name: opened.file(name) for name in opened.files},
            scheme=scheme,
            process_group=group,
        )


def _views(source: Source, scheme: str, group: ProcessGroup | None) -> dict[str, View]:
    """One view per tensor; the flat scheme's states are flattened, as a run without tensor parallelism holds them."""
    # Weights stay canonical in every scheme; only states differ.
    flat: dict[bool, list[str]] = {False: [], True: []}
    for name in source.tensors:
        flat[scheme == DP_RESHARDABLE and not name.startswith(WEIGHTS)].append(name)
    return {
        **views_of_source(source, flat[False], None, group),
        **views_of_source(source, flat[True], None, group, flat=True),
    }
