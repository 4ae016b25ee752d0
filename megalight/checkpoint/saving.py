"""Save: all ranks write beside the final place; when all are done, one seals the folder and renames it."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from megalight import __version__
from megalight.checkpoint import manifest as manifests
from megalight.checkpoint import publish, tree
from megalight.checkpoint.files import FileRecord, sync_directory, write_file
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.staging import Staged, stage
from megalight.checkpoint.torch_files import TorchWriter
from megalight.checkpoint.view import View
from megalight.checkpoint.writer import Writer
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
        path: on storage that all ranks share. A checkpoint that is there is replaced.
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
    path = publish.local(path)
    started: list[publish.Partial] = []

    def begin() -> Path:
        started.append(publish.Partial(path))
        return started[0].folder

    try:
        folder = ranks.first(f"starting to save {path}", begin)
        kind = TorchWriter if staged.scheme == manifests.FSDP_DTENSOR else Writer
        writer = kind(folder, ranks.rank)
        with collectives(f"saving {path}"):
            save_state_dict(
                dict(staged.views),
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=process_group,
                no_dist=ranks.alone,
            )

        def write_small() -> dict[str, FileRecord]:
            records = dict(writer.records)
            if staged.common is not None:
                records |= tree.write(folder, "common", staged.common)
            for rank, state in staged.rank_states.items():
                records |= tree.write(folder, f"ranks/{rank}", state)
            if staged.rank_states:
                sync_directory(folder / "ranks")
            return records

        records = ranks.together(f"saving {path}", write_small)
        ranks.first(f"publishing {path}", lambda: _finish(started[0], records, staged))
    except BaseException as error:
        for partial in started:
            partial.discard()
        if isinstance(error, RuntimeError):
            raise CheckpointError(f"saving {path} failed, perhaps because another rank died: {error}") from error
        raise


def _finish(partial: publish.Partial, records: list[dict[str, FileRecord]], staged: Staged) -> None:
    """Rank 0: write the remaining files, check that all ranks' are there, seal and publish."""
    listed = {name: record for part in records for name, record in part.items()}
    for name, source in staged.files.items():
        data = source.read_bytes() if isinstance(source, Path) else source
        listed[f"files/{name}"] = write_file(partial.folder / "files" / name, data)
    for folder in {(partial.folder / name).parent for name in listed}:
        sync_directory(folder)
    newest = publish.latest(partial.path.parent)
    floor = manifests.read(publish.resolve(newest)).saved_at + 1 if newest else 0
    versions = {"megalight": __version__, "torch": torch.__version__}
    world_size = max(len(records), *(rank + 1 for rank in staged.rank_states), 1)
    manifest = manifests.Manifest(listed, max(time.time_ns(), floor), world_size, versions, staged.scheme)
    try:
        manifests.check_files(partial.folder, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Is {partial.path.parent} on storage that all ranks share?") from error
    manifest.write(partial.folder)
    partial.publish()


@contextmanager
def collectives(stage: str) -> Iterator[None]:
    """DCP's failures as ours: one error that names the first rank that failed, and why."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
        if not isinstance(error, Exception):
            raise error from failure
        text = str(error) if isinstance(error, CheckpointError) else repr(error)
        raise CheckpointError(f"{stage} failed on rank {rank}: {text}") from error
