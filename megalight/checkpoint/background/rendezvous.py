"""How workers report that their parts are written: one file per rank beside the data, gone before the seal.

The worker locks ``parts/<rank>.json.writing`` as long as it lives. ``parts/<rank>.json`` says what it has written, or
why it could not. Both begin with a line that names the machine: some file systems have locks that other machines do not
see, so a missing lock proves a death on the same machine only. Remote storage has no locks: there only the
last file is written, and its trainer notices the death of a worker. No torch in here.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from megalight.checkpoint.disk import index
from megalight.checkpoint.disk.files import FileRecord, Place, dump_json, parse_json, write_all, write_file
from megalight.checkpoint.disk.part import Written
from megalight.checkpoint.disk.publish import delete, locked, machine
from megalight.errors import CheckpointError

FOLDER = "parts"
STARTUP_SECONDS = 120.0
"""A worker that has not shown itself after this time will not come."""
PERIOD_SECONDS = 0.02
REMOTE_SECONDS = 0.1
WATCHED = 16
"""Ranks that are looked at per period: each look asks the storage three times, which many ranks write to."""


def announcement(folder: Place, rank: int) -> Announcement:
    """Begin to report the part of a rank to the others."""
    return LockedAnnouncement(folder, rank) if isinstance(folder, Path) else Announcement(folder, rank)


class Announcement:
    """What one worker reports to the others about one save."""

    def __init__(self, folder: Place, rank: int) -> None:
        self._done = folder / FOLDER / f"{rank}.json"

    def tell(self, outcome: Written | str) -> None:
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

    def tell(self, outcome: Written | str) -> None:
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


def collect(folder: Place, ranks: int) -> list[Written]:
    """Wait for the parts of all ranks, and remove their reports.

    Raises:
        CheckpointError: a worker failed or died.
    """
    begun = time.monotonic()
    found: dict[int, Written] = {}
    while len(found) < ranks:
        left = sorted(set(range(ranks)) - found.keys())
        # One listing for all ranks: a store charges for each request, and many ranks ask it.
        there = None if isinstance(folder, Path) else _listed(folder / FOLDER)
        for rank in left if there is None else (rank for rank in left if f"{rank}.json" in there):
            written = _look(folder, rank, time.monotonic() - begun)
            if written is not None:
                found[rank] = written
        if len(found) < ranks:
            time.sleep(REMOTE_SECONDS if there is not None else PERIOD_SECONDS * (1 + len(left) // WATCHED))
    delete(folder / FOLDER)
    return [found[rank] for rank in range(ranks)]


def _listed(folder: Place) -> set[str]:
    with suppress(FileNotFoundError):
        return {each.name for each in folder.iterdir()}
    return set()


def _look(folder: Place, rank: int, seconds: float) -> Written | None:
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


def _said(outcome: Written | str) -> bytes:
    return dump_json({"error": outcome} if isinstance(outcome, str) else _plain(outcome))


def _plain(written: Written) -> dict[str, object]:
    records = {name: [record.size, record.checksum] for name, record in written.records.items()}
    tensors = [[tensor.name, index.to_json({"": tensor})[""]] for tensor in written.tensors]
    return {"error": None, "records": records, "tensors": tensors, "archives": written.archives}


def _parse(path: Place, rank: int) -> Written:
    value = parse_json(path.read_bytes().partition(b"\n")[2], str(path))
    if value["error"] is not None:
        raise CheckpointError(f"rank {rank}: {value['error']}")
    records = {name: FileRecord(size, digest) for name, (size, digest) in value["records"].items()}
    tensors = tuple(index.tensor_from_json(name, item, str(path)) for name, item in value["tensors"])
    archives = tuple((name, tuple(offset), *place) for name, offset, *place in value["archives"])
    return Written(records, tensors, archives)
