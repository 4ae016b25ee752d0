"""Asynchronous saves that fail or are aborted while they begin: all know, nothing stays, the next one works."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalight import checkpoint
from megalight.checkpoint import saving
from megalight.checkpoint.async_save import saves
from megalight.checkpoint.async_save.saves import KINDS, AsyncSaver, Kind, PendingSave, SaveWorker, SharedMemory
from megalight.checkpoint.ranks import Ranks
from megalight.errors import CheckpointError
from tests.checkpoint import simple
from tests.checkpoint.async_workers import workers_of
from tests.checkpoint.layouts import Layout, Model
from tests.support.workers import run

LIMIT = 60.0
"""Seconds for what must not hang."""


@pytest.fixture(params=KINDS)
def background(request: pytest.FixtureRequest) -> Iterator[AsyncSaver]:
    made = AsyncSaver(request.param)
    yield made
    made.close()
    assert not workers_of(os.getpid())


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


FAILURES: dict[str, tuple[object, str, Exception]] = {
    "memory": (SharedMemory, "reserve", OSError(errno.ENOMEM, "Cannot allocate memory")),
    "device": (saving, "_copied", torch.OutOfMemoryError("out of memory")),
    "disk": (saves.publish, "Save", OSError(errno.EIO, "Input/output error")),
    "process": (saves, "SaveWorker", OSError(errno.EAGAIN, "Resource temporarily unavailable")),
}


def _fails(path: Path, what: str, victim: int, kind: Kind) -> tuple[str, int]:
    """Save; fail to begin the second save, on one rank; save again."""
    background, model = AsyncSaver(kind), Model(Layout(2, 1, "no_shard"), dist.get_rank(), filled=True)
    place, name, error = FAILURES[what]
    try:
        checkpoint.save(path, model.views(), common={"step": 0})
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == victim:
                patch.setattr(place, name, raising(error))
            with pytest.raises(CheckpointError) as told:
                background.save(path, model.views(), common={"step": 1})
        assert background.pending is None
        left = len(workers_of(os.getpid()))
        dist.barrier()
        assert checkpoint.latest(path.parent) == path
        assert checkpoint.open(path).common == {"step": 0}
        dist.barrier()
        for step in (2, 3):
            background.save(path, model.views(), common={"step": step})
            background.settle()
            dist.barrier()
            assert checkpoint.open(path).common == {"step": step}
            again = Model(Layout(2, 1, "no_shard"), dist.get_rank(), filled=False)
            checkpoint.open(path).fill(checkpoint.targets_of(again.views()))
            assert again.differs(model) == []
        return str(told.value), left
    finally:
        background.close()


@pytest.mark.parametrize(
    ("what", "victim", "kind"),
    [
        ("memory", 1, "persistent"),
        ("device", 0, "per_save"),
        ("disk", 0, "persistent"),
        ("process", 1, "per_save"),
        pytest.param("memory", 0, "per_save", marks=pytest.mark.full),
        pytest.param("device", 1, "persistent", marks=pytest.mark.full),
        pytest.param("process", 0, "persistent", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_cannot_begin_is_told_of_and_the_next_save_works(
    tmp_path: Path, what: str, victim: int, kind: Kind
) -> None:
    (first, left), (second, left_too) = run(_fails, 2, tmp_path / "a.ckpt", what, victim, kind)
    assert first == second
    assert f"failed on rank {victim}" in first
    assert str(FAILURES[what][2].args[-1]) in first
    assert (left, left_too) == (0, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


class Copying:
    """Stands for copies from a GPU that arrive a moment after they are waited for."""

    def __init__(self) -> None:
        self.arrived = False

    def fence(self) -> None:
        pass

    def wait(self) -> None:
        self.arrived = True


def _copies_of_the_other(path: Path) -> bool:
    """Rank 1 cannot copy; return whether rank 0's copies, which nobody needs, have arrived before memory is reused."""
    background, model = AsyncSaver(), Model(Layout(2, 1, "no_shard"), dist.get_rank(), filled=True)
    copied, copies = saving._copied, Copying()

    def with_copies(*arguments: Any) -> Any:
        return copied(*arguments)[0], copies

    try:
        with pytest.MonkeyPatch.context() as patch:
            fails = dist.get_rank() == 1
            patch.setattr(saving, "_copied", raising(MemoryError()) if fails else with_copies)
            with pytest.raises(CheckpointError, match=r"failed on rank 1: MemoryError\(\)"):
                background.save(path, model.views())
        return copies.arrived
    finally:
        background.close()


def test_copies_of_a_save_that_another_rank_could_not_begin_are_waited_for(tmp_path: Path) -> None:
    assert run(_copies_of_the_other, 2, tmp_path / "a.ckpt") == [True, False]


def _copies_of_a_failed_gpu(path: Path) -> str:
    """Copies of rank 1's aborted save fail in the next one, which rank 0 must hear of."""
    background, model = AsyncSaver(), Model(Layout(2, 1, "no_shard"), dist.get_rank(), filled=True)
    try:
        if dist.get_rank() == 1:
            failed = Copying()
            failed.wait = raising(RuntimeError("CUDA error"))  # type: ignore[method-assign]
            background._copies = failed  # type: ignore[assignment]
        with pytest.raises(CheckpointError) as told:
            background.save(path, model.views())
        return str(told.value)
    finally:
        background.close()


def test_copies_that_fail_are_told_of_on_all_ranks(tmp_path: Path) -> None:
    for message in run(_copies_of_a_failed_gpu, 2, tmp_path / "a.ckpt"):
        assert "failed on rank 1: RuntimeError('CUDA error')" in message
    assert not list(tmp_path.iterdir())


PLACES = ("staging", "starting", "giving", "started", "noting")
"""Where the thread that trains may be when another one aborts."""


def abort_at(place: str, background: AsyncSaver, patch: pytest.MonkeyPatch) -> None:
    """Abort once, when the next save comes to a place."""
    stage, together, give = saves.stage, Ranks.together, SaveWorker.give

    def staging_(*arguments: Any, **options: Any) -> Any:
        background.abort()
        return stage(*arguments, **options)

    class Starting(SaveWorker):
        def __init__(self, memory: SharedMemory) -> None:
            super().__init__(memory)
            background.abort()  # in the same thread, as a signal does

    def giving(worker: SaveWorker, job: Any) -> None:
        background.abort()
        give(worker, job)

    def started(ranks: Ranks, what: str, work: Callable[[], Any]) -> Any:
        answers = together(ranks, what, work)
        if work.__name__ == "give":
            background.abort()
        return answers

    class Noted(PendingSave):
        def __init__(self, *values: Any) -> None:
            super().__init__(*values)
            background.abort()

    target, name, value = {
        "staging": (saves, "stage", staging_),
        "starting": (saves, "SaveWorker", Starting),
        "giving": (SaveWorker, "give", giving),
        "started": (Ranks, "together", started),
        "noting": (saves, "PendingSave", Noted),
    }[place]
    patch.setattr(target, name, value)


@pytest.mark.parametrize("place", PLACES)
def test_an_abort_while_a_save_begins_ends_it(
    tmp_path: Path, background: AsyncSaver, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simple.save(tmp_path / "a.ckpt", 1)
    with monkeypatch.context() as patch:
        abort_at(place, background, patch)
        with pytest.raises(CheckpointError, match="aborted"):
            simple.save(tmp_path / "a.ckpt", 2, background)
    assert background.pending is None
    assert not workers_of(os.getpid())
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
    assert simple.step_of(tmp_path / "a.ckpt") == 1
    simple.save(tmp_path / "a.ckpt", 3, background)
    background.settle()
    assert simple.step_of(tmp_path / "a.ckpt") == 3


def test_an_abort_does_not_wait_for_a_save_that_begins(
    tmp_path: Path, background: AsyncSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that trains waits for a rank that is gone."""
    inside, go_on, told = threading.Event(), threading.Event(), list[str]()
    stage = saves.stage

    def waits(*arguments: Any, **options: Any) -> Any:
        inside.set()
        assert go_on.wait(LIMIT)
        return stage(*arguments, **options)

    def save() -> None:
        try:
            simple.save(tmp_path / "a.ckpt", 1, background)
        except CheckpointError as error:
            told.append(str(error))

    monkeypatch.setattr(saves, "stage", waits)
    trains = threading.Thread(target=save, daemon=True)
    trains.start()
    assert inside.wait(LIMIT)
    aborts = threading.Thread(target=background.abort, daemon=True)
    aborts.start()
    aborts.join(LIMIT)
    assert not aborts.is_alive()
    go_on.set()
    trains.join(LIMIT)
    assert not trains.is_alive()
    (message,) = told
    assert "aborted" in message
    assert not list(tmp_path.iterdir())


def _aborted_on_one(path: Path, place: str) -> tuple[str, str]:
    """Rank 1 is aborted while a save begins. Rank 0 hears of it, and both save again."""
    background, model = AsyncSaver(), Model(Layout(2, 1, "no_shard"), dist.get_rank(), filled=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                abort_at(place, background, patch)
            with pytest.raises(CheckpointError) as told:
                background.save(path, model.views())
        background.save(path, model.views(), common={"step": 2})
        background.settle()
        dist.barrier()
        return str(told.value), str(checkpoint.open(path).common)
    finally:
        background.close()


@pytest.mark.parametrize("place", ["staging", "giving"])
def test_an_abort_of_one_rank_is_told_to_all(tmp_path: Path, place: str) -> None:
    for message, common in run(_aborted_on_one, 2, tmp_path / "a.ckpt", place):
        assert "failed on rank 1: it was aborted." in message
        assert common == "{'step': 2}"
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_process_group_that_is_gone_does_not_keep_the_folder(
    tmp_path: Path, background: AsyncSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = Ranks.together

    def lost(ranks: Ranks, what: str, work: Callable[[], Any]) -> Any:
        if what == "ending workers":
            raise dist.DistBackendError("connection closed by peer")
        return together(ranks, what, work)

    monkeypatch.setattr(Ranks, "together", lost)
    monkeypatch.setattr(saves, "SaveWorker", raising(OSError(errno.EAGAIN, "no more processes")))
    with pytest.raises(CheckpointError, match="no more processes"):
        simple.save(tmp_path / "a.ckpt", 1, background)
    assert not list(tmp_path.iterdir())


class Stuck:
    """A killed process that waits for storage, in which no signal reaches it."""

    pid = 0

    def kill(self) -> None:
        pass

    def wait(self, limit: float | None = None) -> int:
        assert limit is not None, "this would take for ever"
        raise subprocess.TimeoutExpired("worker", limit)


def test_a_worker_that_cannot_be_killed_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    worker = SaveWorker.__new__(SaveWorker)
    worker.process = Stuck()  # type: ignore[assignment]
    worker.end()
    assert "has not ended: its storage does not answer" in caplog.text


def test_memory_that_cannot_grow_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, unpinned = SharedMemory(), list[bool]()
    held = memory.reserve(100)
    monkeypatch.setattr(memory, "_unpin", lambda: unpinned.append(True))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", raising(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            memory.reserve(1 << 20)
    assert not unpinned
    held.fill_(3)
    assert memory.reserve(100).eq(3).all()
    assert memory.reserve(1 << 20).numel() == 1 << 20
    assert unpinned
    memory.close()
