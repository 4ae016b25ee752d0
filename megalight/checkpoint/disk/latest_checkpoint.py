"""The latest finished checkpoint in a folder of runs, at any depth."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

from megalight.checkpoint.disk import manifest, publish
from megalight.checkpoint.disk.files import PathLike
from megalight.errors import CheckpointError, MegalightError
from megalight.hub import local

DEPTH = 6
"""Levels of folders that are searched: a run may be started in a folder that holds much else."""


def latest_checkpoint(path: str | os.PathLike[str]) -> PathLike:
    """Return the latest finished checkpoint in a folder of runs, or the folder of a name of the Hugging Face Hub.

    Any other path stays as it is.

    Args:
        path: a checkpoint, a folder that holds some at any depth, or a name (:func:`megalight.hub.local`).

    Raises:
        CheckpointError: the path is the folder of a run that has saved no checkpoint.
        HubError: the Hub has no such name, refuses it, or does not answer.
    """
    folder = publish.place(local(path))
    # A checkpoint itself, a single file, or an address that another part understands.
    if not folder.is_dir() or not _may_hold(folder):
        return folder
    found = next(iter(checkpoints_in([folder])), folder)
    if found == folder and manifest.is_run(folder) and not (folder / "config.json").exists():
        raise CheckpointError(
            f"{path}: this run has saved no finished checkpoint. Give the folder of one that has, or train it until it "
            "saves (ModelCheckpoint)."
        )
    return found


def suggest_other(path: PathLike) -> str:
    """Return a sentence for an error that names another checkpoint, in a folder of runs or beside ``path``; or nothing.

    Args:
        path: what is no finished checkpoint, or a damaged one.
    """
    # Storage that fails now, and other damage, must not hide the error that this is added to.
    with suppress(MegalightError, OSError):
        held = latest_checkpoint(path)
        if held != path:
            return f" The newest finished checkpoint in it is {held}."
        # What lies beside a run is another run.
        if manifest.is_run(path):
            return ""
        others = [other for other in publish.finished(path.parent) if other != path]
        return f" The newest finished checkpoint beside it is {others[-1]}." if others else ""
    return ""


def checkpoints_in(places: Iterable[PathLike]) -> list[PathLike]:
    """Return all finished checkpoints in folders of runs, the latest first."""
    found = {each for place in places for each in _finished(place)}
    return [path for _, path in sorted(found, key=_age, reverse=True)]


def _age(found: tuple[int, PathLike]) -> tuple[int, str]:
    return found[0], str(found[1])


def _finished(here: PathLike, levels: int = DEPTH) -> Iterator[tuple[int, PathLike]]:
    """Yield when each finished checkpoint was saved, in nanoseconds since 1970, and its place.

    Hidden ones do not count: a learning-rate finder that was killed leaves one behind.
    """
    for path in publish.finished(here):
        if not path.name.startswith("."):
            yield manifest.read(publish.resolve(path)).saved_at, path
    inside: list[PathLike] = [*here.iterdir()] if here.is_dir() else []
    for entry in sorted(inside, key=str):
        if entry.name.startswith("."):
            continue
        # As os.walk does: a folder that nobody may read holds no checkpoint for us, but those beside it may.
        with suppress(PermissionError, FileNotFoundError, NotADirectoryError):
            if entry.is_dir():
                deeper = levels > 0 and not entry.is_symlink() and _may_hold(entry)
                yield from _finished(entry, levels - 1) if deeper else ()
            elif entry.name.endswith(".ckpt"):
                yield entry.stat().st_mtime_ns, entry


def _may_hold(folder: PathLike) -> bool:
    """Whether a folder may hold checkpoints: not if it is one itself."""
    return not (publish.resolve(folder) / manifest.NAME).exists()
