"""Open and load a checkpoint: nothing is used before it is verified, and nothing changes before all ranks agree.

:func:`open` verifies manifest, index and sizes. :meth:`Checkpoint.fill` then compares names and shapes with those that
all ranks ask for (:func:`compare`), and lets torch's Distributed Checkpoint (DCP) plan the reads. Its storage layer is
:class:`CheckpointReader`, which verifies every block of the plan before it reads into the tensors' memory.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megalight.checkpoint import json_values
from megalight.checkpoint.boxes import host_buffer, hull, in_threads, read_box
from megalight.checkpoint.disk import index, manifest, publish
from megalight.checkpoint.disk.datafile import DataFile, Pinned
from megalight.checkpoint.disk.files import CODES, FileRecord, PathLike, blocks, parse_json, read_file
from megalight.checkpoint.disk.index import TensorInfo
from megalight.checkpoint.disk.latest_checkpoint import suggest_other
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.scheme import SCHEMES
from megalight.checkpoint.view import views_to_fill
from megalight.errors import CheckpointError, MissingCheckpointError, nearest
from megalight.parallel.source import FillReport, Source, Target, TensorMetadata

SHOWN = 5
"""Tensors that a message names."""


ATTEMPTS = 3
"""How many times a missing folder is opened again: another one may have taken its place at that moment."""


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: manifest, index and sizes of all files are verified; tensors when they are loaded.

    Raises:
        CheckpointError: missing, unfinished, torn, foreign, or of a later version; the message names the latest
            good checkpoint in the same folder, if there is one.
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


class SavedCheckpoint(Source, Protocol):
    """A checkpoint of training, in any format: a source of tensors, with the plain values that were saved with them."""

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

    def __init__(self, path: PathLike) -> None:
        self.path = path
        root = publish.resolve(path)
        # Locked before anything is read: another process might remove the checkpoint while it is.
        lock = publish.lock_for_reading(root)
        # A save may put another folder in its place meanwhile. Parts of both would be neither checkpoint.
        self._root: PathLike = root if lock is None else Pinned.folder(Path(root), lock)
        # Also when the object is dropped without `release`: a lock that stays would keep
        # the checkpoint for ever.
        self._unlock = weakref.finalize(self, _close, lock)
        self.manifest = manifest.read(self._root)
        if self.manifest.scheme not in SCHEMES:
            raise CheckpointError(
                f"checkpoint {path} was written by the scheme {self.manifest.scheme!r}; known: {', '.join(SCHEMES)}. "
                "Install the plugin that has it, or upgrade Megalight."
            )
        # Sizes only: contents are verified where they are read.
        manifest.check_files(self._root, self.manifest)
        what = f"{path}/{index.NAME}"
        self.tensors: dict[str, TensorInfo] = index.from_json(parse_json(self._bytes(index.NAME), what), what)

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
    ) -> FillReport:
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
                storage_reader=CheckpointReader(self._root, tensors, dict(self.manifest.files)),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=process_group,
                no_dist=ranks.alone,
            )
        return filled

    def _bytes(self, name: str) -> bytes:
        if name not in self.manifest.files:
            raise CheckpointError(f"checkpoint {self.path} is malformed: its manifest does not list {name}.")
        return read_file(self._root, name, self.manifest.files[name])


def compare(
    ranks: Ranks,
    where: str,
    stored: Mapping[str, TensorMetadata],
    asked: Mapping[str, tuple[int, ...]],
    *,
    strict: bool,
    prefix: str,
    label: Callable[[str], str] = repr,
    lenient: str = "strict=False",
    remedy: str = "",
) -> FillReport:
    """Check that names and shapes agree; see :meth:`megalight.parallel.source.Source.fill`.

    Args:
        asked: canonical name -> global shape, on this rank.
        strict: see there.
        prefix: see there.
        label: what messages call a tensor.
        lenient: what a user sets to accept other names.
        remedy: what a user does instead, if it is known why they differ.

    Raises:
        CheckpointError: on every rank, when they differ on any.
    """

    def advice(effect: str) -> str:
        return remedy or f"Is it of another model? {lenient} {effect}."

    def check() -> list[str]:
        # Sorted, so that every run names the same tensors.
        missing = sorted(asked.keys() - stored.keys())
        if strict and missing:
            meant = "" if remedy else nearest(missing[0], stored)
            raise CheckpointError(
                f"{_some(missing, label)} not in {where}.{meant} {advice('leaves such tensors as they are')}"
            )
        known = sorted(asked.keys() & stored.keys())
        differ = [name for name in known if tuple(stored[name].shape) != tuple(asked[name])]
        if differ:
            lines = "; ".join(f"{label(n)}: {list(stored[n].shape)} and {list(asked[n])}" for n in differ[:SHOWN])
            more = f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
            raise CheckpointError(
                f"shapes in {where} and in this model differ: {lines}{more}. {remedy or 'Is it of another model?'}"
            )
        return list(asked)

    # All ranks together: one that fails alone would leave the others in a collective.
    everyone = ranks.together(f"loading {where}", check)

    # On rank 0, which knows what all ranks ask for: a rank of a pipeline asks for its own layers only.
    def leftover() -> tuple[str, ...]:
        # As sets: a source that is read tensor by tensor comes here as often as it has names.
        others = stored.keys() - {name for names in everyone for name in names}
        return tuple(sorted(name for name in others if name.startswith(prefix)) if prefix else sorted(others))

    unexpected = ranks.first(f"loading {where}", leftover)
    if strict and unexpected:
        raise CheckpointError(
            f"{where} holds {_some(unexpected, label)} that this model does not ask for. "
            f"{advice('ignores such tensors')}"
        )
    # Missing ones are a rank's own; unexpected ones are known of all ranks only.
    return FillReport(tuple(sorted(asked.keys() - stored.keys())), unexpected)


class CheckpointReader(StorageReader):
    """Reads the parts of a checkpoint that a rank's views need, after verifying them.

    Verification is part of DCP's planning, so that a torn file fails all ranks before any tensor has changed.
    """

    def __init__(self, directory: PathLike, tensors: dict[str, TensorInfo], records: dict[str, FileRecord]) -> None:
        self.directory = directory
        self.records = records
        self.tensors = tensors
        self.chunks = {
            MetadataIndex(info.name, chunk.offset): (info, chunk) for info in tensors.values() for chunk in info.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in DCP's terms."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, info.dtype)),
                    torch.Size(info.shape),
                    [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.size)) for c in info.chunks],
                )
                for name, info in self.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify every block that the plan will read."""
        wanted: dict[str, dict[tuple[int, int, str], str]] = {}
        for item in plan.items:
            info, chunk = self.chunks[item.storage_index]
            width = CODES[info.dtype][1]
            first, last = hull(chunk.size, item.storage_offsets, item.lengths)
            # Whole blocks, as a checksum covers one. A block that no box touches is not read.
            for number, (start, stop) in enumerate(blocks(prod(chunk.size) * width)):
                if start < last * width and first * width < stop:
                    place = (chunk.start + start, chunk.start + stop, chunk.sums[number])
                    wanted.setdefault(chunk.file, {})[place] = info.name

        def verify(name: str, places: Sequence[tuple[int, int, str]]) -> None:
            with DataFile(self.directory, name, self.records) as file:
                file.verify(())
                for place in places:
                    try:
                        file.block(*place)
                    except CheckpointError as error:
                        raise CheckpointError(f"{error} They belong to {wanted[name][place]!r}.") from error

        # Verified here, in DCP's planning: an error on one rank stops all of them before memory changes.
        in_threads(verify, ((name, sorted(places)) for name, places in sorted(wanted.items())))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the views' memory."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.chunks[item.storage_index][1].file, []).append(item)

        def read(name: str, items: Sequence[ReadItem]) -> None:
            with DataFile(self.directory, name, self.records, host_buffer().numpy()) as file:
                for item in items:
                    info, chunk = self.chunks[item.storage_index]
                    target = planner.resolve_tensor(item).detach()
                    # Straight into the memory of the view, whatever its device and strides.
                    read_box(file, chunk.start, getattr(torch, info.dtype), chunk.size, item.storage_offsets, target)
                    planner.commit_tensor(item, target)

        in_threads(read, sorted(by_file.items()))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP does not choose this reader by path; :func:`megalight.checkpoint.open` opens folders."""
        return False


def _some(names: Collection[str], label: Callable[[str], str]) -> str:
    shown = ", ".join(label(name) for name in list(names)[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


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
def _naming_another(path: PathLike) -> Iterator[None]:
    """Let errors of a checkpoint name the latest finished one in the same folder."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{error}{suggest_other(path)}") from error
