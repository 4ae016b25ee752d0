"""The newest checkpoint of all runs: what ``--ckpt_path=last`` and ``--ckpt_path=auto`` mean."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from megalight.checkpoint import manifest as manifests
from megalight.checkpoint import publish
from megalight.errors import CheckpointError

DEPTH = 6
"""Levels of folders that are searched: a run may be started in a folder that holds much else."""


def resolve(wanted: str | None, verb: str, folders: Iterable[str | os.PathLike[str]]) -> str | None:
    """Return the path that ``--ckpt_path`` means; a path, ``best`` and ``hpc`` stay as they are.

    Args:
        wanted: ``last``: the newest finished checkpoint. ``auto``, for ``fit``: the same, or None if there is none.
        verb: the command.
        folders: where runs keep their checkpoints.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    if wanted != "last" and (wanted != "auto" or verb != "fit"):
        return wanted
    places = sorted({Path(folder).absolute() for folder in folders})
    found = max((each for place in places for each in _finished(place)), default=None)
    if found is not None:
        rank_zero_info(f"--ckpt_path={wanted}: the newest checkpoint is {found[1]}")
        return str(found[1])
    where = ", ".join(map(str, places))
    if wanted == "last":
        raise CheckpointError(
            f"--ckpt_path=last: there is no finished checkpoint under {where}. Give the path of one, or "
            "--ckpt_path=auto to start anew if there is none."
        )
    rank_zero_info(f"--ckpt_path=auto: there is no finished checkpoint under {where}; the run starts anew")
    return None


def folders_of(trainer: Any) -> list[str]:
    """Where runs of a trainer's configuration keep checkpoints: its root folder, and folders that callbacks name."""
    given = trainer.get("callbacks") or []
    callbacks = given if isinstance(given, list) else [given]
    named = [(each.get("init_args") or {}).get("dirpath") for each in callbacks if hasattr(each, "get")]
    return [trainer.get("default_root_dir") or ".", *filter(None, named)]


def _finished(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield when each finished checkpoint was saved, in nanoseconds since 1970, and its path.

    Hidden ones do not count: a learning-rate finder that was killed leaves one behind.
    """
    for folder, names, files in os.walk(root):
        here = Path(folder)
        for path in publish.finished(here):
            if not path.name.startswith("."):
                yield manifests.read(publish.resolve(path)).saved_at, path
        for path in (here / name for name in files if name.endswith(".ckpt") and not name.startswith(".")):
            yield path.stat().st_mtime_ns, path
        deep = len(here.relative_to(root).parts) >= DEPTH
        names[:] = [] if deep else [name for name in names if not name.startswith(".") and _may_hold(here / name)]


def _may_hold(folder: Path) -> bool:
    """Whether a folder may hold checkpoints: not if it is one itself."""
    return not (folder / manifests.NAME).exists()
