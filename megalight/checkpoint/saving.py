"""Save: all ranks write beside the final place; when all are done, one seals the folder and renames it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megalight import __version__
from megalight.checkpoint.disk import manifest as manifests
from megalight.checkpoint.disk import publish
from megalight.checkpoint.disk.files import Place
from megalight.checkpoint.disk.part import Seal, Written, write_part
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.staging import Staged, stage
from megalight.checkpoint.view import View, elements
from megalight.checkpoint.writer import host_blocks
from megalight.errors import CheckpointError


def save(
    path: str | os.PathLike[str],
    views: Mapping[str, View],
    *,
    common: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Any] | None = None,
    other_ranks: Mapping[int, Mapping[str, Any]] | None = None,
    files: Mapping[str, bytes | Path] | None = None,
    scheme: str = manifests.FULLY_RESHARDABLE,
    process_group: ProcessGroup | None = None,
) -> None:
    """Save a checkpoint as the folder ``path``, atomically. All ranks of the group call it together.

    A save that fails or is killed at any moment leaves what was at ``path`` before, untouched.

    Args:
        path: a folder, or an address of remote storage, that all ranks share. A checkpoint that is there is replaced.
        views: this rank's views (see :mod:`megalight.checkpoint.view`), by canonical name.
        common: plain values that belong to the whole run; rank 0's are kept.
        rank_state: plain values of this rank (random states).
        other_ranks: the same of ranks that are not here, because a checkpoint of theirs is rewritten.
        files: other files to keep beside, by name: contents, or where to copy from; rank 0's are kept.
        scheme: by which the views were made (see :mod:`megalight.checkpoint.scheme`).
        process_group: who saves; None means the default group, or this process alone.

    Raises:
        CheckpointError: on every rank, when any rank failed; nothing is left behind.
    """
    staged = stage(
        views,
        common=common,
        rank_state=rank_state,
        other_ranks=other_ranks,
        files=files,
        scheme=scheme,
        copy=False,
        process_group=process_group,
    )
    write(path, staged, process_group=process_group)


def write(path: str | os.PathLike[str], staged: Staged, *, process_group: ProcessGroup | None = None) -> None:
    """The second half of :func:`save`: write what :func:`~megalight.checkpoint.stage` collected.

    It may run in a thread beside training, with a process group of its own.

    Raises:
        CheckpointError: on every rank, when any rank failed; nothing is left behind.
    """
    ranks = Ranks(process_group)
    path = publish.absolute(path)
    started: list[publish.Unfinished] = []

    def begin() -> Place:
        started.append(publish.begin(path))
        folder: Place = started[0].folder
        return folder

    def write_mine() -> Written:
        return write_part(folder, staged.part(ranks.rank), host_blocks(elements(staged.boxes)))

    def finish() -> None:
        # The manifest is written last. A folder without it is not a checkpoint.
        seal_of(path, staged).close(folder, parts)
        started[0].publish()

    try:
        # Rank 0 makes the folder before others write into it.
        folder = ranks.first(f"starting to save {path}", begin)
        parts = ranks.together(f"saving {path}", write_mine)
        ranks.first(f"publishing {path}", finish)
    # Also on an interrupt: a half-written folder must not stay.
    except BaseException as error:
        for partial in started:
            partial.discard()
        if isinstance(error, RuntimeError):
            raise CheckpointError(f"saving {path} failed, perhaps because another rank died: {error}") from error
        raise


def seal_of(path: Place, staged: Staged) -> Seal:
    """What rank 0 needs to seal the checkpoint."""
    # a plain str: torch's own class of versions would make a worker import torch
    versions = {"megalight": __version__, "torch": str(torch.__version__)}
    return Seal(path, staged.scheme, staged.world_size, versions)
