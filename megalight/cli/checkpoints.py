"""Checkpoints that a command names: what ``--ckpt_path=last``, ``auto`` and ``FOLDER`` mean, and a run's tokenizer."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from megalight.checkpoint.disk import manifest, publish
from megalight.checkpoint.disk.files import PathLike
from megalight.checkpoint.disk.latest_checkpoint import checkpoints_in, latest_checkpoint, suggest_other
from megalight.checkpoint.inspection import verify
from megalight.cli.report import launched
from megalight.data.blend import Mixture
from megalight.data.corpus import tokenizer_path
from megalight.errors import CheckpointError, DataError

CHOSEN = "MEGALIGHT_CHOSEN_CHECKPOINT"
"""Environment variable by which a process tells those that it starts its own id, and which checkpoint it chose."""

LIGHTNINGS = ("best", "hpc")
"""Words for ``--ckpt_path`` that Lightning understands itself."""


def resolve(wanted: str | None, verb: str, folders: Iterable[str | os.PathLike[str]]) -> str | None:
    """Return the path that ``--ckpt_path`` means; a checkpoint, ``best`` and ``hpc`` stay as they are.

    Args:
        wanted: ``last``: the newest finished checkpoint. ``auto``, for ``fit``: the same, or None if there is none. A
            folder of runs: the newest finished checkpoint in it.
        folders: where runs keep their checkpoints.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    if wanted in (None, *LIGHTNINGS):
        return wanted
    if wanted != "last" and (wanted != "auto" or verb != "fit"):
        held = latest_checkpoint(wanted)
        if held != publish.place(wanted):
            _log(f"--ckpt_path={wanted}: the newest checkpoint in it is {held}")
        return str(held)
    places = _places(folders)
    found = _newest_undamaged(places)
    if found is not None:
        _log(f"--ckpt_path={wanted}: the newest checkpoint is {found}")
        return str(found)
    if wanted == "last":
        raise _none(places)
    where = ", ".join(map(str, places))
    _log(f"--ckpt_path=auto: there is no finished checkpoint under {where}; the run starts from scratch")
    return None


def check_is_one(path: PathLike) -> None:
    """Raise :class:`CheckpointError` if a path is no finished checkpoint. This takes no torch, unlike opening it."""
    try:
        manifest.read(publish.resolve(path))
    except CheckpointError as error:
        raise type(error)(f"{error}{suggest_other(path)}") from error


def existing(path: str | os.PathLike[str]) -> PathLike:
    """Return what :func:`latest_checkpoint` does, for a command that also takes folders of others.

    Raises:
        CheckpointError: nothing is there. This takes no torch.
    """
    found = latest_checkpoint(path)
    if not publish.resolve(found).exists():
        check_is_one(found)
    return found


def model_paths(arguments: argparse.Namespace) -> tuple[PathLike, str | Path | None, PathLike | None]:
    """Return the paths of the model, tokenizer (None: the model's) and base of a command.

    Args:
        arguments: with ``checkpoint``, ``tokenizer`` and ``base``.

    Raises:
        CheckpointError: the checkpoint or the base is not there. This takes no torch.
    """
    path = latest_checkpoint(arguments.checkpoint)
    if str(path) != arguments.checkpoint.rstrip("/"):
        # To stderr: the output may be piped.
        print(f"reading {path}", file=sys.stderr)
    if not path.is_file() and not (path / "config.json").is_file():  # neither a single file nor one of transformers
        check_is_one(path)
    tokenizer = arguments.tokenizer
    if tokenizer is None and isinstance(path, Path) and path.is_file():
        tokenizer = tokenizer_of_run(path)
        if tokenizer is not None:
            print(f"reading the tokenizer of the run, {tokenizer}", file=sys.stderr)
    return path, tokenizer, None if arguments.base is None else existing(arguments.base)


def _none(places: Iterable[PathLike]) -> CheckpointError:
    return CheckpointError(
        f"--ckpt_path=last: there is no finished checkpoint under {', '.join(map(str, places))}. Give the path of one, "
        "or --ckpt_path=auto to start from scratch if there is none."
    )


def _newest_undamaged(places: Iterable[PathLike]) -> PathLike | None:
    """Return the newest checkpoint whose every byte is as it was saved.

    The process that starts the others verifies, and they use its choice. Processes that a cluster starts cannot agree
    here, so they verify nothing: loading verifies what it reads, and names the checkpoint before it.
    """
    chooser, _, path = os.environ.get(CHOSEN, "").partition(":")
    if launched() and chooser != str(os.getpid()):  # Lightning marks also the process that starts the others
        return _newest(places) if not chooser else publish.place(path) if path else None
    chosen = None
    # Newest first, so that the search ends with the first one that is good.
    for found in checkpoints_in(places):
        damage = verify(found) if found.is_dir() else []
        if not damage:
            chosen = found
            break
        _log(f"{found} is damaged and is not used: {damage[0]}")
    # Told to the processes that come, which must not choose another one.
    os.environ[CHOSEN] = f"{os.getpid()}:{chosen or ''}"
    return chosen


def _newest(places: Iterable[PathLike]) -> PathLike | None:
    return next(iter(checkpoints_in(places)), None)


def _places(folders: Iterable[str | os.PathLike[str]]) -> list[PathLike]:
    return sorted({publish.absolute(folder) for folder in folders}, key=str)


def _log(message: str) -> None:
    from lightning.pytorch.utilities import rank_zero_info  # slow: commands without a Trainer do not need it

    rank_zero_info(message)


def folders_of(trainer: Any) -> list[str]:
    """Where runs of a trainer's configuration keep checkpoints: its root folder, and folders that callbacks name."""
    given = trainer.get("callbacks") or []
    callbacks = given if isinstance(given, list) else [given]
    named = [(each.get("init_args") or {}).get("dirpath") for each in callbacks if hasattr(each, "get")]
    return [trainer.get("default_root_dir") or ".", *filter(None, named)]


RUN_CONFIG = "config.yaml"
CONFIG_LEVELS = 2
"""Folders above a checkpoint in which the configuration may be: beside it, or above ``checkpoints``."""


def tokenizer_of_run(checkpoint: Path) -> Path | None:
    """Return the path of the tokenizer of the run that wrote a checkpoint, or None if that is not known."""
    for folder in checkpoint.resolve().parents[:CONFIG_LEVELS]:
        if (folder / RUN_CONFIG).is_file():
            return next((path for path in _named_tokenizers(folder / RUN_CONFIG) if path.exists()), None)
    return None


def _named_tokenizers(config: Path) -> list[Path]:
    """Return the tokenizers that a run may have used: the one that it was given, then those of its data."""
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []  # it may be another program's
    data = _section(content, "data")
    given = _section(data, "init_args") or data
    found = [Path(given["tokenizer"])] if isinstance(given.get("tokenizer"), str) else []
    for name in ("data", "train_data"):
        if given.get(name):
            try:
                found += map(tokenizer_path, Mixture.parse(given[name]).prefixes)
            except (DataError, TypeError, ValueError):
                continue  # another data module may mean something else by it
    return found


def _section(content: Any, name: str) -> dict[str, Any]:
    section = content.get(name) if isinstance(content, dict) else None
    return section if isinstance(section, dict) else {}
