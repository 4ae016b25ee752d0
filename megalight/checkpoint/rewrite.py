"""Rewrite a checkpoint of any scheme as canonical tensors, which every layout reads."""

from __future__ import annotations

import os
from collections.abc import Callable

from megalight.checkpoint.combine import Watched
from megalight.checkpoint.flat import canonical
from megalight.checkpoint.loading import open as open_checkpoint
from megalight.checkpoint.ranks import alone
from megalight.checkpoint.saving import save
from megalight.checkpoint.view import views_of_source


def rewrite(path: str | os.PathLike[str], output: str | os.PathLike[str], report: Callable[[int], None]) -> None:
    """Write everything in a checkpoint again, as ``fully_reshardable``. One process calls it.

    Weights, optimizer state, random states of all ranks and files are kept, so that a run resumes from the result as
    from the original. One tensor is in memory at a time.

    Args:
        path: the checkpoint.
        output: the folder to write.
        report: called with the number of elements that were read, now and then.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or ``output`` cannot be written.
    """
    opened = open_checkpoint(path)
    source = Watched(canonical(opened), report)
    states = {rank: opened.rank_state(rank) for rank in range(opened.world_size)}
    names = [name.removeprefix("files/") for name in opened.manifest.files if name.startswith("files/")]
    with alone() as group:
        save(
            output,
            views_of_source(source, source.tensors, None, group),
            common=opened.common,
            other_ranks={rank: state for rank, state in states.items() if state is not None},
            files={name: opened.file(name) for name in names},
            process_group=group,
        )
