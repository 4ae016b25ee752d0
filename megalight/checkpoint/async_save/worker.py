"""The worker process of asynchronous saves: it writes one rank's part of a checkpoint while its trainer trains.

The trainer sends a :class:`Job` for each save and gets a :class:`SaveReport`. The worker of rank 0 also waits for the
other ranks' parts, seals the folder and publishes it. A worker stops when its trainer does, however that ends.

Workers tell each other that their parts are written by one file per rank in the folder, which is deleted before the
seal. The worker locks ``parts/<rank>.json.writing`` as long as it lives. ``parts/<rank>.json`` says what it has
written, or why it could not. Both start with a line that names the machine: some file systems have locks that other
machines do not see, so a missing lock proves a death on the same machine only. Object stores have no locks: there only
the last file is written, and its trainer notices the death of a worker. No torch in here, so that a worker starts
quickly.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from megalight.checkpoint.disk import index
from megalight.checkpoint.disk.files import FileRecord, PathLike, blocks, dump_json, parse_json, write_all, write_file
from megalight.checkpoint.disk.publish import delete, publish
from megalight.checkpoint.disk.rank_files import RankFiles, Seal, WrittenFiles, write_part
from megalight.checkpoint.disk.storage import locked, machine
from megalight.errors import CheckpointError

FOLDER = "parts"
STARTUP_SECONDS = 120.0
"""A worker that has not shown itself after this time will not come."""
RENDEZVOUS_PERIOD_SECONDS = 0.02
REMOTE_SECONDS = 0.1
WATCHED = 16
"""Ranks that are looked at per period: each look asks the storage three times, which many ranks write to."""


WORKER_PERIOD_SECONDS = 0.1
"""Time between two looks at the trainer."""


@dataclass(frozen=True)
class Job:
    """One save, as one worker sees it.

    Attributes:
        folder: the checkpoint while it is written.
        part: what this rank writes.
        starts: where each piece starts in the shared memory, in bytes.
        ranks: how many ranks write.
        seal: for rank 0: how the checkpoint is sealed.
    """

    folder: PathLike
    part: RankFiles
    starts: tuple[int, ...]
    ranks: int
    seal: Seal | None


@dataclass(frozen=True)
class SaveReport:
    """How a job ended.

    Attributes:
        error: None if the part is written and, on rank 0, the checkpoint published.
        at: when, in seconds since 1970.
    """

    error: str | None
    at: float


def main() -> None:
    """Serve a trainer. Arguments: descriptors of the connection and of the memory, and the trainer's process."""
    connection, memory, parent = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    serve(Connection(connection), memory)


def serve(connection: Connection, memory: int) -> None:
    """Do jobs until the trainer closes the connection."""
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, OSError):
            # The trainer is gone or done: there is nothing more to write.
            return
        error = None
        try:
            perform(job, memory)
        except Exception as failure:
            error = _text(failure)
        connection.send(SaveReport(error, time.time()))


def perform(job: Job, memory: int) -> None:
    """Write this rank's part from shared memory; on rank 0, seal and publish the checkpoint.

    Raises:
        CheckpointError: another rank failed.
        OSError: the storage failed.
    """
    told = announcement(job.folder, job.part.rank)
    try:
        # not closed here: a failed write still refers to it, and its error must be the one that is reported
        view = memoryview(mmap.mmap(memory, 0, access=mmap.ACCESS_READ))
        told.tell(write_part(job.folder, job.part, _pieces(job, view)))
    except Exception as error:
        told.tell(_text(error))
        raise
    finally:
        told.close()
    if job.seal is not None:
        job.seal.close(job.folder, collect(job.folder, job.ranks))
        publish(job.folder, job.seal.path)


def announcement(folder: PathLike, rank: int) -> Announcement:
    """Start to report the part of a rank to the others."""
    return LockedAnnouncement(folder, rank) if isinstance(folder, Path) else Announcement(folder, rank)


class Announcement:
    """What one worker reports to the others about one save."""

    def __init__(self, folder: PathLike, rank: int) -> None:
        self._done = folder / FOLDER / f"{rank}.json"

    def tell(self, outcome: WrittenFiles | str) -> None:
        """Say what was written, or what went wrong."""
        write_file(self._done, f"{machine()}\n".encode() + _said(outcome))

    def close(self) -> None:
        """Say nothing more."""


class LockedAnnouncement(Announcement):
    """The same on a file system: the worker's death shows by the lock that it leaves."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, rank)
        (folder / FOLDER).mkdir(exist_ok=True)
        self._writing = folder / FOLDER / f"{rank}.json.writing"
        new = folder / FOLDER / f"{rank}.json.new"
        self._descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        lock = locked(new)
        self._open = [self._descriptor, *([] if lock is None else [lock])]
        write_all(self._descriptor, f"{machine()}\n".encode())
        os.rename(new, self._writing)  # locked before it can be seen: without a lock it would report a death

    def tell(self, outcome: WrittenFiles | str) -> None:
        """See :class:`Announcement`."""
        try:
            write_all(self._descriptor, _said(outcome))
            os.fsync(self._descriptor)  # other hosts see the name only with its content
            os.rename(self._writing, self._done)
        finally:
            self.close()

    def close(self) -> None:
        """See :class:`Announcement`."""
        while self._open:
            os.close(self._open.pop())


def collect(folder: PathLike, ranks: int) -> list[WrittenFiles]:
    """Wait for the parts of all ranks, and remove their reports.

    Raises:
        CheckpointError: a worker failed or died.
    """
    begun = time.monotonic()
    found: dict[int, WrittenFiles] = {}
    while len(found) < ranks:
        left = sorted(set(range(ranks)) - found.keys())
        # One listing for all ranks: a store charges for each request, and many ranks ask it.
        there = None if isinstance(folder, Path) else _listed(folder / FOLDER)
        for rank in left if there is None else (rank for rank in left if f"{rank}.json" in there):
            written = _look(folder, rank, time.monotonic() - begun)
            if written is not None:
                found[rank] = written
        if len(found) < ranks:
            time.sleep(REMOTE_SECONDS if there is not None else RENDEZVOUS_PERIOD_SECONDS * (1 + len(left) // WATCHED))
    delete(folder / FOLDER)
    return [found[rank] for rank in range(ranks)]


def _listed(folder: PathLike) -> set[str]:
    with suppress(FileNotFoundError):
        return {each.name for each in folder.iterdir()}
    return set()


def _look(folder: PathLike, rank: int, seconds: float) -> WrittenFiles | None:
    """What a rank has written; None if it is not done."""
    done, writing = (folder / FOLDER / f"{rank}.json{end}" for end in ("", ".writing"))
    # looked at first: a worker renames its file, then ends
    alive = not isinstance(writing, Path) or _alive(writing, seconds)
    if done.exists():
        return _parse(done, rank)
    if not alive:
        raise CheckpointError(f"the worker process of rank {rank} died.")
    return None


def _alive(writing: Path, seconds: float) -> bool:
    try:
        lock = locked(writing)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return seconds < STARTUP_SECONDS
    if lock is None:  # no locks on this file system: its trainer notices its death
        return True
    with open(lock, encoding="utf-8") as file:
        return file.readline().strip() != machine()


def _said(outcome: WrittenFiles | str) -> bytes:
    return dump_json({"error": outcome} if isinstance(outcome, str) else _plain(outcome))


def _plain(written: WrittenFiles) -> dict[str, object]:
    records = {name: [record.size, record.checksum] for name, record in written.records.items()}
    tensors = [[tensor.name, index.to_json({"": tensor})[""]] for tensor in written.tensors]
    return {"error": None, "records": records, "tensors": tensors, "archives": written.archives}


def _parse(path: PathLike, rank: int) -> WrittenFiles:
    value = parse_json(path.read_bytes().partition(b"\n")[2], str(path))
    if value["error"] is not None:
        raise CheckpointError(f"rank {rank}: {value['error']}")
    records = {name: FileRecord(size, digest) for name, (size, digest) in value["records"].items()}
    tensors = tuple(index.tensor_from_json(name, item, str(path)) for name, item in value["tensors"])
    archives = tuple((name, tuple(offset), *place) for name, offset, *place in value["archives"])
    return WrittenFiles(records, tensors, archives)


def _pieces(job: Job, memory: memoryview) -> Iterator[Iterator[memoryview]]:
    for piece, begin in zip(job.part.pieces, job.starts, strict=True):
        yield (memory[begin + start : begin + stop] for start, stop in blocks(piece.entry.nbytes))


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else repr(error)


def _end_with(parent: int) -> None:
    """Stop this process when its trainer is gone, even during a write."""
    # A parent that has died is replaced by another process: the number changes.
    while os.getppid() == parent:
        time.sleep(WORKER_PERIOD_SECONDS)
    # At once: the trainer's own end must not wait for a write that nobody will publish.
    os._exit(1)
