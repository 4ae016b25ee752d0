"""Open and load: nothing is used before it has been verified, and nothing changes before all ranks agree."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict

from megalight.checkpoint import json_values
from megalight.checkpoint.compare import compare
from megalight.checkpoint.disk import index as indices
from megalight.checkpoint.disk import manifest as manifests
from megalight.checkpoint.disk import publish
from megalight.checkpoint.disk.files import Place, parse_json, read_file
from megalight.checkpoint.disk.index import TensorInfo
from megalight.checkpoint.disk.newest import another
from megalight.checkpoint.disk.pinned import Pinned
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.reader import Reader
from megalight.checkpoint.scheme import SCHEMES
from megalight.checkpoint.view import views_to_fill
from megalight.errors import CheckpointError, MissingCheckpointError, nearest
from megalight.parallel.source import Filled, Source, Target

ATTEMPTS = 3
"""How many times a missing folder is opened again: another one may have taken its place at that moment."""


class Saved(Source, Protocol):
    """A checkpoint of training, whoever wrote it: a source of tensors with what was saved beside them."""

    @property
    def path(self) -> object:
        """The name it goes by."""

    @property
    def common(self) -> dict[str, Any]:
        """What belongs to no rank: the state of loops, schedules, callbacks, and groups of the optimizer."""

    @property
    def scheme(self) -> str:
        """How its tensors are named."""

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """What rank ``rank`` saved for itself; None: nothing."""

    def release(self) -> None:
        """Let others remove the checkpoint."""


class Checkpoint:
    """An opened checkpoint: a source whose metadata is verified and whose tensors are on disk until :meth:`fill`.

    Attributes:
        path: the name it goes by.
        manifest: files, versions, who saved it and when.
        tensors: canonical name -> shape, dtype, chunks.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        root = publish.resolve(path)
        # Locked before anything is read: another process might remove the checkpoint while it is.
        lock = publish.reading(root)
        # A save may put another folder in its place meanwhile. Parts of both would be neither checkpoint.
        self._root: Place = root if lock is None else Pinned.folder(Path(root), lock)
        # Also when the object is dropped without `release`: a lock that stays would keep
        # the checkpoint for ever.
        self._unlock = weakref.finalize(self, _close, lock)
        self.manifest = manifests.read(self._root)
        if self.manifest.scheme not in SCHEMES:
            raise CheckpointError(
                f"checkpoint {path} was written by the scheme {self.manifest.scheme!r}; known: {', '.join(SCHEMES)}. "
                "Install the plugin that has it, or upgrade Megalight."
            )
        # Sizes only: contents are verified where they are read.
        manifests.check_files(self._root, self.manifest)
        what = f"{path}/{indices.NAME}"
        self.tensors: dict[str, TensorInfo] = indices.from_json(parse_json(self._bytes(indices.NAME), what), what)

    def release(self) -> None:
        """Let others remove the checkpoint. Until this is called, or the object is gone, they wait."""
        self._unlock()

    @cached_property
    def common(self) -> dict[str, Any]:
        """What was saved as ``common``."""
        with _naming_another(self.path):
            value = json_values.read(self._root, "common", dict(self.manifest.files))
            if not isinstance(value, dict):
                raise CheckpointError(f"common in checkpoint {self.path} is not a dict.")
        return value

    @property
    def scheme(self) -> str:
        """By which it was written (see :mod:`megalight.checkpoint.scheme`)."""
        return self.manifest.scheme

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self.manifest.world_size

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """What rank ``rank`` saved as ``rank_state``; None where there was no such rank, or it saved none."""
        if f"ranks/{rank}.json" not in self.manifest.files:
            return None
        with _naming_another(self.path):
            value: dict[str, Any] = json_values.read(self._root, f"ranks/{rank}", dict(self.manifest.files))
        return value

    @property
    def files(self) -> list[str]:
        """Names of the files that were saved along."""
        # Files of the user have a folder of their own, so that no name collides with ours.
        return [key.removeprefix("files/") for key in self.manifest.files if key.startswith("files/")]

    def file(self, name: str) -> bytes:
        """A file that was saved along.

        Raises:
            CheckpointError: there is none of this name, or it is torn.
        """
        if name not in self.files:
            raise CheckpointError(
                f"checkpoint {self.path} holds no file {name!r}; it holds {', '.join(self.files) or 'none'}."
                f"{nearest(name, self.files)}"
            )
        with _naming_another(self.path):
            return self._bytes(f"files/{name}")

    def fill(
        self,
        targets: Iterable[Target],
        *,
        strict: bool = True,
        prefix: str = "",
        process_group: ProcessGroup | None = None,
    ) -> Filled:
        """Read this rank's boxes, whatever layout saved them; see :meth:`megalight.parallel.source.Source.fill`.

        Every block that any rank will read is verified before any memory changes.

        Raises:
            CheckpointError: on every rank: names or shapes differ, or a file that any rank needs is torn.
        """
        ranks, views = Ranks(process_group), views_to_fill(targets)
        asked = {name: tuple(view.shape) for name, view in views.items()}
        filled = compare(ranks, f"checkpoint {self.path}", self.tensors, asked, strict=strict, prefix=prefix)
        # Missing ones were reported above; DCP would fail on them.
        present = {name: view for name, view in views.items() if name in self.tensors}
        # Of all others the reader need not know: a checkpoint may be read tensor by tensor.
        tensors = {name: self.tensors[name] for name in present}
        with _naming_another(self.path), _collectives(f"loading {self.path}"):
            # DCP plans which rank reads what. Its own formats play no part.
            load_state_dict(
                dict(present),
                storage_reader=Reader(self._root, tensors, dict(self.manifest.files)),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=process_group,
                no_dist=ranks.alone,
            )
        return filled

    def _bytes(self, name: str) -> bytes:
        if name not in self.manifest.files:
            raise CheckpointError(f"checkpoint {self.path} is malformed: its manifest does not list {name}.")
        return read_file(self._root, name, self.manifest.files[name])


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: manifest, index and sizes of all files are verified; tensors when they are loaded.

    Raises:
        CheckpointError: missing, unfinished, torn, foreign, or of a later version; the message names the newest good
            checkpoint beside it, if there is one.
    """
    path = publish.absolute(path)
    with _naming_another(path):
        try:
            for _ in range(ATTEMPTS if isinstance(path, Path) else 0):
                with suppress(FileNotFoundError, NotADirectoryError):
                    return Checkpoint(path)
            return Checkpoint(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            if isinstance(error, CheckpointError):
                raise
            # Removed at any moment since its name was seen: where there are no locks, nothing keeps it.
            raise MissingCheckpointError(f"checkpoint {path} was removed while it was opened.") from error


@contextmanager
def _collectives(stage: str) -> Iterator[None]:
    """DCP's failures as ours: one error that names the first rank that failed, and why."""
    try:
        with warnings.catch_warnings():
            # DCP warns that one process loads alone, which is meant here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failure:
        # The lowest rank, so that all ranks name the same one.
        rank, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
        # An interrupt or the end of the process passes as it is.
        if not isinstance(error, Exception):
            raise error from failure
        text = str(error) if isinstance(error, CheckpointError) else repr(error)
        raise CheckpointError(f"{stage} failed on rank {rank}: {text}") from error


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


@contextmanager
def _naming_another(path: Place) -> Iterator[None]:
    """Let errors of a checkpoint end with the newest finished one beside it."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{error}{another(path)}") from error
