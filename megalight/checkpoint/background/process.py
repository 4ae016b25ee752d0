"""A worker (:mod:`~megalight.checkpoint.background.worker`) as the process that has started it sees it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

from megalight.checkpoint.background.shared import SharedMemory
from megalight.checkpoint.background.worker import Job, Report

log = logging.getLogger(__name__)

BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""A cluster sends these to all processes of a job. The trainer stops by them; its worker then finishes the save."""
END_SECONDS = 10.0
"""How long a killed worker may take to be gone. One that waits for storage that does not answer stays until it does."""


class Worker:
    """The process that writes for this rank."""

    def __init__(self, memory: SharedMemory) -> None:
        self._connection, theirs = Pipe()
        fds = (theirs.fileno(), memory.descriptor)
        package = str(Path(__file__).parents[3])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        # not -m: messages name their classes by module, and that of a script is another one here
        code = "from megalight.checkpoint.background.worker import main; main()"
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

    def report(self) -> Report | None:
        """What came of the job; None while it is under way. A dead worker has failed."""
        try:
            # A report counts even if the worker has died since.
            if self._connection.poll():
                report: Report = self._connection.recv()
                return report
        except (EOFError, OSError):
            return Report(f"the worker process died (exit code {self.process.wait()}).", time.time())
        return None

    def end(self) -> None:
        """Kill it, whatever it does, and wait until it is gone."""
        self.process.kill()
        # the connection closes with this object: another thread may be looking into it for a report
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the killed worker process %d has not ended: its storage does not answer", self.process.pid)
