"""Asynchronous saves: a step waits for the copy to host memory only, and a worker process per rank writes the files.

:class:`AsyncSaver` stages a save into :class:`SharedMemory`, which is kept between saves because allocating takes
longer than copying, and hands it to a :class:`SaveWorker`, the trainer's side of a process
(:mod:`~megalight.checkpoint.async_save.worker`). One save is in progress at a time, so checkpoints appear in the order
of their saves. All collectives are on the host and in the thread that trains; the workers of all ranks meet through the
checkpoint's own folder.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.checkpoint.async_save.worker import Job, SaveReport
from megalight.checkpoint.disk import publish
from megalight.checkpoint.disk.files import PathLike
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.saving import HostCopies, Staged, seal_of, stage
from megalight.checkpoint.view import View
from megalight.errors import CheckpointError

log = logging.getLogger(__name__)


class SharedMemory:
    """Memory behind a file descriptor; pinned if there is a GPU.

    Attributes:
        descriptor: of a file without a name, which a child process maps too.
    """

    def __init__(self) -> None:
        self.descriptor = _nameless_file()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._making: threading.Thread | None = None

    @property
    def address(self) -> int:
        """Where the memory starts in this process."""
        return self._memory.data_ptr()

    def prepare(self, nbytes: int) -> None:
        """Allocate the memory in a thread, so that a later :meth:`reserve` finds it."""
        assert self._making is None
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def make() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # a thread starts on device 0
            with suppress(OSError):  # the save itself reports that there is none
                self._grow(nbytes)

        self._making = threading.Thread(target=make, daemon=True)
        self._making.start()

    def reserve(self, nbytes: int) -> Tensor:
        """Memory of at least ``nbytes``, as ``uint8``. What it held before is lost.

        Raises:
            OSError: the system has no memory left.
        """
        self._join()
        self._grow(nbytes)
        return self._memory[:nbytes]

    def _join(self) -> None:
        making, self._making = self._making, None
        if making is not None:
            making.join()

    def _grow(self, nbytes: int) -> None:
        # Kept while it is large enough: pinning new memory takes longer than a save.
        if nbytes > self._memory.numel() or not self._memory.numel():
            size = max(nbytes, mmap.PAGESIZE)
            # without it, memory that is not there would be a fatal signal at the first write
            allocate = getattr(os, "posix_fallocate", lambda file, _, size: os.ftruncate(file, size))
            allocate(self.descriptor, 0, size)
            memory = torch.from_numpy(np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8))
            # Only now, as the old memory serves on where there is no more. Pinned memory must not be freed.
            self._unpin()
            self._memory = memory
            self._pin()

    def close(self) -> None:
        """Give the memory back when nobody uses it any more."""
        self._join()
        self._unpin()
        self._memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)

    def _pin(self) -> None:
        if not torch.cuda.is_available():
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
        self._pinned = int(status) == 0
        if not self._pinned:
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # takes CUDA's error, or the next kernel of training would report it
            log.warning("memory for saves cannot be pinned (%s), so copies from the GPU are slower", status)

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
            self._pinned = False


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("megalight-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""A cluster sends these to all processes of a job. The trainer stops by them; its worker then finishes the save."""
END_SECONDS = 10.0
"""How long a killed worker may take to be gone. One that waits for storage that does not answer stays until it does."""


Kind: TypeAlias = Literal["persistent", "per_save"]
"""How long a worker lives: as long as the run, or for one save."""

KINDS: tuple[Kind, ...] = ("persistent", "per_save")
PERIOD_SECONDS = 0.01
LIMIT_SECONDS = 600.0
"""How long a save may continue after training has failed."""


class AsyncSaver:
    """The asynchronous saves of one rank. All ranks have one, and call its methods in the same order.

    Args:
        kind: whether one worker serves the whole run, or each save starts its own.
        process_group: who saves; a group whose collectives work on the host. None: the default group.

    Attributes:
        pending: the save in progress, or None. It is None on all ranks or on none.
    """

    def __init__(self, kind: Kind = "persistent", process_group: ProcessGroup | None = None) -> None:
        self.kind = kind
        self.pending: PendingSave | None = None
        self._group = process_group
        self._memory: SharedMemory | None = None
        self._worker: SaveWorker | None = None
        self._copies: HostCopies | None = None
        self._aborts = 0
        # Taken again by the thread that has it: a signal may call `abort` at any place.
        self._lock = threading.RLock()

    def prepare(self, nbytes: int) -> None:
        """Allocate the memory for saves in a thread: pinned memory takes longer to allocate than to fill.

        Args:
            nbytes: of a save on this rank; see :func:`megalight.checkpoint.saving.size_of`.
        """
        self._own_memory().prepare(nbytes)

    def fence(self) -> None:
        """Let GPU work that is queued from now on wait for the copies of the save in progress."""
        if self._copies is not None:
            self._copies.fence()

    def save(self, path: str | os.PathLike[str], views: Mapping[str, View], **values: Any) -> None:
        """Start to save ``path``: copy what this rank writes, and return while its worker writes it.

        Args:
            path: as for :func:`megalight.checkpoint.save`.
            **values: further arguments of :func:`~megalight.checkpoint.stage`. With ``later``, call :meth:`fence`
                before these values change.

        Raises:
            CheckpointError: on every rank, when any rank could not begin. Nothing is left behind, and the next save
                starts over. Also, on this rank alone, after an :meth:`abort` that came when all ranks had begun.
        """
        # Staging and handing over happen at one moment on all ranks: the checkpoint is of one step.
        assert self.pending is None, "finish the save in progress first"
        target, begun, ranks, aborts = publish.absolute(path), time.time(), self._ranks, self._aborts
        started: list[publish.Save] = []

        def begin() -> PathLike:
            if str(target).startswith("memory://"):
                raise CheckpointError(
                    f"{path} is memory of this process, which its worker process does not see. Save without "
                    "async_save, or to other storage."
                )
            started.append(publish.Save(target))
            folder: PathLike = started[0].folder
            return folder

        def give() -> None:
            # the other workers look for this rank's part: no rank may leave before all have handed over theirs
            try:
                self._give(folder, target, staged, aborts)
            except OSError as error:
                # Its worker was ended between its start and its job.
                raise CheckpointError("it was aborted.") if self._aborts != aborts else error from None

        try:
            folder = ranks.first(f"starting to save {path}", begin)
            staged = stage(views, copy=self._reserve, process_group=self._group, **values)
            # Known from here on, also if a rank cannot go on: the next save waits for them.
            self._copies = staged.copies
            ranks.together(f"starting to save {path}", give)
        except BaseException as error:
            # The worker may have begun to write.
            self._end_worker()
            if isinstance(error, CheckpointError):  # on all ranks
                self._wait_for_ends()
            for partial in started:
                partial.discard()
            raise
        waited = time.time() - begun
        pending = PendingSave(target, begun, waited, started[0] if started else None)
        with self._lock:
            # Known before the look: a signal between both may abort in this thread, which the lock does not stop.
            self.pending = pending
            if self._aborts == aborts:
                return
            self.pending = None
        # Aborted when all ranks had begun. The others do not know of it, so this must be no collective.
        self._end_worker()
        for partial in started:
            partial.discard()
        raise CheckpointError(f"saving {path} was aborted while it began.")

    def ready(self) -> bool:
        """Whether the save in progress has ended. A collective of all ranks, on the host."""
        pending = self.pending
        return pending is not None and self._news(pending)

    def settle(self) -> PendingSave:
        """Wait until the save in progress is published, on all ranks together.

        Raises:
            CheckpointError: on every rank, when any failed. Nothing is left behind, and what was there before stays.
        """
        pending, ranks = self.pending, self._ranks
        assert pending is not None
        # of this save, though abort() may forget it meanwhile: the other ranks are in the same collectives
        while not self._news(pending):
            time.sleep(PERIOD_SECONDS)

        def outcome() -> None:
            if pending.report is not None and pending.report.error is not None:
                raise CheckpointError(pending.report.error)

        try:
            ranks.together(f"saving {pending.path}", outcome)
        except CheckpointError:
            self._end_worker()
            self._wait_for_ends()
            self._clear(discard=True)
            raise
        while not self._ended(pending):  # its part is written, as rank 0 knows; its own report is on the way
            time.sleep(PERIOD_SECONDS)
        self._clear(discard=False)
        return pending

    def settle_alone(self) -> PendingSave | None:
        """Wait for this rank's worker, when other ranks may be gone. On rank 0: until all parts are there or lost.

        Returns:
            the save, if its checkpoint was published as far as this rank knows. None if there was none.
        """
        pending, deadline = self.pending, time.monotonic() + LIMIT_SECONDS
        if pending is None:
            return None
        while not self._ended(pending) and time.monotonic() < deadline:
            time.sleep(PERIOD_SECONDS)
        # Too late is failed: other ranks may never write their parts.
        failed = pending.report is None or pending.failed
        if failed:
            self._end_worker()
        self._clear(discard=failed)
        return None if failed else pending

    def abort(self) -> None:
        """Kill this rank's worker at once and drop the save in progress.

        No collective: an in-process restarter calls it, in any thread. A call of :meth:`settle` or :meth:`save` in
        another thread raises an error. A published checkpoint stays; a folder that was not published is left to the
        next save, which deletes it.
        """
        with self._lock:
            self._aborts += 1
            pending = self.pending
        if pending is not None and pending.report is None:
            # Before the worker dies, so that its death is not reported.
            pending.report = SaveReport("it was aborted.", time.time())
        self._end_worker()
        self._clear(discard=True)

    def close(self) -> None:
        """End the worker and free the memory."""
        self.abort()
        # A GPU that has failed copies nothing more. Its error has ended training, and must not be replaced by this one.
        with suppress(RuntimeError):
            self._end_copies()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    @property
    def _ranks(self) -> Ranks:
        return Ranks(self._group)

    def _own_memory(self) -> SharedMemory:
        if self._memory is None:
            self._memory = SharedMemory()
        return self._memory

    def _reserve(self, nbytes: int) -> Any:
        # Those of a save that did not end, into the same memory. Here, where all ranks learn of an error.
        self._end_copies()
        return self._own_memory().reserve(nbytes)

    def _end_copies(self) -> None:
        """Wait until nothing is copied into the memory any more."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.wait()

    def _give(self, folder: PathLike, path: PathLike, staged: Staged, aborts: int) -> None:
        assert self._memory is not None
        ranks = self._ranks
        starts = tuple(box.data.data_ptr() - self._memory.address for _, box in staged.boxes)
        seal = seal_of(path, staged) if ranks.rank == 0 else None
        job = Job(folder, staged.part(ranks.rank), starts, ranks.size, seal)
        with self._lock:
            if self._worker is not None and self._worker.process.poll() is not None:
                self._end_worker()  # somebody killed it between two saves
            worker = self._worker = self._worker or SaveWorker(self._memory)
            # Under the lock: an abort comes before, and is seen here, or after, and ends this worker.
            if self._aborts != aborts:
                raise CheckpointError("it was aborted.")
        if staged.copies is None:
            worker.give(job)
        else:
            threading.Thread(target=_give_after, args=(staged.copies, worker, job), daemon=True).start()

    def _news(self, pending: PendingSave) -> bool:
        """Whether a save has ended, on any rank."""
        ranks = self._ranks
        # parts that are written end nothing: rank 0's worker publishes when it has all of them
        return ranks.any(self._ended(pending) and (ranks.rank == 0 or pending.failed))

    def _ended(self, pending: PendingSave) -> bool:
        """Whether this rank's worker has ended the job."""
        worker = self._worker
        report = None if worker is None or pending.report is not None else worker.report()
        if pending.report is None:  # abort() may have reported since
            pending.report = report
        return pending.report is not None

    def _clear(self, discard: bool) -> None:
        with self._lock:
            pending, self.pending = self.pending, None
            if not discard:
                self._copies = None  # it was written, so it had arrived
        # Not under the lock: storage may take its time, and an abort must not wait for it.
        if pending is not None and pending.partial is not None:
            pending.partial.discard() if discard else pending.partial.release()
        if self.kind == "per_save":
            self._end_worker()

    def _wait_for_ends(self) -> None:
        """Wait until no rank has a worker, which could write into the folder that rank 0 deletes next."""
        # Ranks may be gone, or their process group: then there is nobody to wait for.
        with suppress(CheckpointError, RuntimeError):
            self._ranks.together("ending workers", lambda: None)

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()


@dataclass
class PendingSave:
    """A save in progress.

    Attributes:
        path: where the checkpoint will be.
        begun: when it started, in seconds since 1970.
        waited: seconds that training waited for it.
        partial: its folder, on rank 0.
        report: how this rank's worker ended; None before.
    """

    path: PathLike
    begun: float
    waited: float
    partial: publish.Save | None
    report: SaveReport | None = None

    @property
    def seconds(self) -> float:
        """How long it took until this rank's worker was done: on rank 0, until it was published."""
        return 0.0 if self.report is None else self.report.at - self.begun

    @property
    def failed(self) -> bool:
        """Whether this rank's worker has failed."""
        return self.report is not None and self.report.error is not None


class SaveWorker:
    """The process that writes for this rank, as the trainer that started it sees it."""

    def __init__(self, memory: SharedMemory) -> None:
        self._connection, theirs = Pipe()
        fds = (theirs.fileno(), memory.descriptor)
        package = str(Path(__file__).parents[3])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        # not -m: messages name their classes by module, and that of a script is another one here
        code = "from megalight.checkpoint.async_save.worker import main; main()"
        # -P: files in the current folder must not take the place of modules
        command = [sys.executable, "-P", "-c", code, *map(str, fds), str(os.getpid())]
        # checksums use the core that they run on; threads of libraries would take those of the trainer
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        # a child inherits which signals are blocked, so that none ends it, from its first moment on
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        try:
            self.process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, env=environment)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # This end belongs to the worker. As long as it is open here, the worker's death would go unnoticed.
        theirs.close()

    def give(self, job: Job) -> None:
        """Let it do a job.

        Raises:
            OSError: it is dead.
        """
        self._connection.send(job)

    def report(self) -> SaveReport | None:
        """The result of the job; None while it is in progress. A dead worker has failed."""
        try:
            # A report counts even if the worker has died since.
            if self._connection.poll():
                report: SaveReport = self._connection.recv()
                return report
        except (EOFError, OSError):
            return SaveReport(f"the worker process died (exit code {self.process.wait()}).", time.time())
        return None

    def end(self) -> None:
        """Kill it, whatever it does, and wait until it is gone."""
        self.process.kill()
        # the connection closes with this object: another thread may be looking into it for a report
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the killed worker process %d has not ended: its storage does not answer", self.process.pid)


def _give_after(copies: HostCopies, worker: SaveWorker, job: Job) -> None:
    """Let a worker do a job when the copies have arrived. What fails here shows as its death."""
    try:
        copies.wait()
        worker.give(job)
    except Exception:  # of a GPU, which training meets too, or of a worker that was ended
        worker.process.kill()
