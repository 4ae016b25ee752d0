"""Ranks that rank 0 has started end when it is killed. (On GPUs no connection breaks: a collective never ends.)"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.strategies.launchers import subprocess_script
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers import subprocess_script as lightnings

from megalight.strategies import launchers
from tests.support.workers import SERVER

LIMIT = 240
"""Seconds."""


class Forked:
    """In place of a process that runs the script again: a fork of this one."""

    returncode = None

    def __init__(self, *_: Any, env: dict[str, str], **__: Any) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.update(env)
            _rank()

    def poll(self) -> None:
        """Say that it runs."""


def _rank() -> None:
    strategy: Any = SimpleNamespace(
        cluster_environment=LightningEnvironment(), num_processes=2, num_nodes=1, node_rank=0
    )
    launchers.ScriptLauncher(strategy).launch(_train)


def _train() -> None:
    """Rank 1 waits for ever, and rank 0 is killed meanwhile."""
    ready = Path("ready")
    if os.environ["LOCAL_RANK"] == "1":
        ready.write_text(str(os.getpid()))
        time.sleep(10 * LIMIT)
    while not ready.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def _start(folder: Path, alive: Connection) -> None:
    """Be rank 0, in a process that has the imports. Its children, too, hold the connection while they live."""
    os.chdir(folder)
    os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT), 2)
    launchers.PERIOD_SECONDS = launchers.ORPHANS_GRACE_SECONDS = 0.1
    launchers.check = lambda *_, **__: None  # type: ignore[assignment]
    lightnings.subprocess.Popen = subprocess_script.subprocess.Popen = Forked  # type: ignore[assignment,misc]
    _rank()


def test_a_rank_ends_after_rank_0_was_killed(tmp_path: Path) -> None:
    reader, alive = multiprocessing.Pipe(duplex=False)
    first = SERVER.Process(target=_start, args=(tmp_path, alive))
    first.start()
    alive.close()
    first.join(LIMIT)
    assert first.exitcode == -signal.SIGKILL
    try:
        # At its end: nobody but its parent could wait for it.
        assert reader.poll(LIMIT), "rank 1 runs on"
        with pytest.raises(EOFError):
            reader.recv()
    finally:
        with suppress(ProcessLookupError):
            os.kill(int((tmp_path / "ready").read_text()), signal.SIGKILL)
    assert f"Rank 0 (process {first.pid}) was killed" in (tmp_path / "said").read_text()


def test_processes_that_something_else_has_started_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launchers.STARTED_BY, f"{os.getpid()}:nowhere")  # not this one's parent
    monkeypatch.setattr(launchers.threading, "Thread", None)
    launchers.watch()
