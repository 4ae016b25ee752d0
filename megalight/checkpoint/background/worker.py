"""A process that writes one rank's part of checkpoints while its trainer goes on. No torch in here: it starts quickly.

The trainer sends a :class:`Job` for each save and gets a :class:`Report`. The worker of rank 0 also waits for the other
ranks' parts, seals the folder and publishes it. A worker ends when its trainer does, however that ends.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from megalight.checkpoint.background.rendezvous import announcement, collect
from megalight.checkpoint.disk.checksum import blocks
from megalight.checkpoint.disk.files import Place
from megalight.checkpoint.disk.part import Part, Seal, write_part
from megalight.checkpoint.disk.publish import publish
from megalight.errors import CheckpointError

PERIOD_SECONDS = 0.1
"""Time between two looks at the trainer."""


@dataclass(frozen=True)
class Job:
    """One save, as one worker sees it.

    Attributes:
        folder: the checkpoint while it is written.
        part: what this rank writes.
        starts: where each piece begins in the shared memory, in bytes.
        ranks: how many ranks write.
        seal: for rank 0: how the checkpoint is sealed.
    """

    folder: Place
    part: Part
    starts: tuple[int, ...]
    ranks: int
    seal: Seal | None


@dataclass(frozen=True)
class Report:
    """How a job ended.

    Attributes:
        error: None if the part is written and, on rank 0, the checkpoint published.
        at: when, in seconds since 1970.
    """

    error: str | None
    at: float


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


def _pieces(job: Job, memory: memoryview) -> Iterator[Iterator[memoryview]]:
    for piece, begin in zip(job.part.pieces, job.starts, strict=True):
        yield (memory[begin + start : begin + stop] for start, stop in blocks(piece.entry.nbytes))


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else repr(error)


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
        connection.send(Report(error, time.time()))


def _end_with(parent: int) -> None:
    """End this process when its trainer is gone, even in the midst of a write."""
    # A parent that has died is replaced by another process: the number changes.
    while os.getppid() == parent:
        time.sleep(PERIOD_SECONDS)
    # At once: the trainer's own end must not wait for a write that nobody will publish.
    os._exit(1)


def main() -> None:
    """Serve a trainer. Arguments: descriptors of the connection and of the memory, and the trainer's process."""
    connection, memory, parent = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    serve(Connection(connection), memory)
