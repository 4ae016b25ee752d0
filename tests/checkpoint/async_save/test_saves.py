"""Asynchronous saves: equal to others, and safe from failures and kills of trainers and of workers."""

from __future__ import annotations

import errno
import mmap
import multiprocessing as mp
import os
import pickle
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalight import checkpoint
from megalight.checkpoint.async_save import saves, worker
from megalight.checkpoint.async_save.saves import KINDS, AsyncSaver, Kind
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.saving import size_of, stage
from megalight.errors import CheckpointError
from tests.checkpoint import simple
from tests.checkpoint.async_workers import fault, wait_until_gone, workers_of
from tests.checkpoint.layouts import Layout, Model
from tests.support.workers import run


@pytest.fixture(params=KINDS)
def background(request: pytest.FixtureRequest) -> Iterator[AsyncSaver]:
    made = AsyncSaver(request.param)
    yield made
    made.close()
    assert not workers_of(os.getpid())


def files(path: Path) -> dict[str, bytes]:
    """Every file but the manifest, which holds the time."""
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    del found["manifest.json"]
    return found


def test_files_are_those_of_a_plain_save(tmp_path: Path, background: AsyncSaver) -> None:
    for step in (1, 2):  # the second uses memory, and perhaps a worker, that are there
        values, source = simple.tensors(step), tmp_path / "tokenizer.json"
        source.write_text(f"step {step}")
        counts = torch.full((5,), step)
        given = {"common": {"global_step": step, "counts": counts}, "rank_state": {"random": torch.full((9,), step)}}
        checkpoint.save(tmp_path / "plain.ckpt", simple.views(values), files={"tokenizer.json": source}, **given)
        background.save(tmp_path / "async.ckpt", simple.views(values), files={"tokenizer.json": source}, **given)
        for tensor in (*values.values(), counts):
            tensor.fill_(-1)
        source.write_text("changed")
        saved = background.settle()
        assert background.pending is None
        assert saved.waited > 0
        assert saved.seconds > 0
        assert simple.step_of(tmp_path / "async.ckpt") == step
        assert files(tmp_path / "async.ckpt") == files(tmp_path / "plain.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {"plain.ckpt", "async.ckpt", "tokenizer.json"}
    assert len(workers_of(os.getpid())) == (background.kind == "persistent")


def test_files_of_torch_are_those_of_a_plain_save(tmp_path: Path) -> None:
    background, views = AsyncSaver(), simple.views(simple.tensors(1))
    checkpoint.save(tmp_path / "plain.ckpt", views, scheme="fsdp_dtensor")
    background.save(tmp_path / "async.ckpt", views, scheme="fsdp_dtensor")
    background.settle()
    background.close()
    saved, plain = files(tmp_path / "async.ckpt"), files(tmp_path / "plain.ckpt")
    # pickles of equal values differ in what they share
    assert pickle.loads(saved.pop(".metadata")) == pickle.loads(plain.pop(".metadata"))
    assert saved == plain


class Copying:
    """Stands for copies from a GPU: they arrive when they are told to."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.fences = 0

    def fence(self) -> None:
        self.fences += 1

    def wait(self) -> None:
        assert self.arrived.wait(60)


def test_a_save_begins_when_its_copies_have_arrived(
    tmp_path: Path, background: AsyncSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copying()
    monkeypatch.setattr(saves, "stage", lambda *args, **kwargs: replace(stage(*args, **kwargs), copies=copies))
    simple.save(tmp_path / "a.ckpt", 1, background)
    background.fence()
    time.sleep(0.3)
    assert not background.ready()
    copies.arrived.set()
    background.settle()
    assert simple.step_of(tmp_path / "a.ckpt") == 1
    background.fence()  # nothing is under way
    assert copies.fences == 1


def test_an_aborted_save_leaves_the_memory_when_its_copies_have_arrived(
    tmp_path: Path, background: AsyncSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copying()
    with monkeypatch.context() as patched:
        patched.setattr(saves, "stage", lambda *args, **kwargs: replace(stage(*args, **kwargs), copies=copies))
        simple.save(tmp_path / "a.ckpt", 1, background)
    background.abort()
    threading.Timer(0.2, copies.arrived.set).start()
    simple.save(tmp_path / "b.ckpt", 2, background)
    assert copies.arrived.is_set(), "the next save would have been copied into the same memory"
    background.settle()
    assert simple.step_of(tmp_path / "b.ckpt") == 2
    assert not (tmp_path / "a.ckpt").exists()


class Failed(Copying):
    """Copies of a GPU that has failed: each wait raises the error of its kernel."""

    def wait(self) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered", 710)


def test_the_error_of_a_gpu_does_not_keep_a_run_from_its_end(
    tmp_path: Path, background: AsyncSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Failed()
    monkeypatch.setattr(saves, "stage", lambda *args, **kwargs: replace(stage(*args, **kwargs), copies=copies))
    simple.save(tmp_path / "a.ckpt", 1, background)
    assert background.settle_alone() is None
    background.close()
    assert background._memory is None
    assert not (tmp_path / "a.ckpt").exists()


def test_memory_is_made_ahead(tmp_path: Path, background: AsyncSaver) -> None:
    views = simple.views(simple.tensors(1))
    background.prepare(size_of(views))
    simple.save(tmp_path / "a.ckpt", 1, background)
    assert background._memory is not None
    size = background._memory._memory.numel()
    background.settle()
    assert size == max(size_of(views), mmap.PAGESIZE)
    assert simple.step_of(tmp_path / "a.ckpt") == 1


def test_a_job_needs_no_torch(tmp_path: Path, background: AsyncSaver) -> None:
    """So that workers start quickly and are small."""
    simple.save(tmp_path / "a.ckpt", 1, background)
    assert background._worker is not None
    libraries = Path(f"/proc/{background._worker.process.pid}/maps")
    deadline = time.monotonic() + 60
    while not checkpoint.is_complete(tmp_path / "a.ckpt"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "libtorch" not in libraries.read_text()
    background.settle()


def test_a_file_in_the_current_folder_is_no_module(
    tmp_path: Path, background: AsyncSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secrets.py").write_text("raise RuntimeError('not the library')")
    monkeypatch.chdir(tmp_path)
    simple.save(tmp_path / "a.ckpt", 1, background)
    background.settle()
    assert simple.step_of(tmp_path / "a.ckpt") == 1


def test_nothing_to_write_is_a_checkpoint_too(tmp_path: Path) -> None:
    background = AsyncSaver()
    background.save(tmp_path / "a.ckpt", {}, common={"step": 1})
    background.settle()
    assert checkpoint.open(tmp_path / "a.ckpt").common == {"step": 1}
    background.close()


def _two_ranks(path: Path) -> list[str]:
    """Save under one layout beside, load under none."""
    background, model = AsyncSaver(), Model(Layout(2, 1, "no_shard"), dist.get_rank(), filled=True)
    try:
        for _ in range(2):
            background.save(path, model.views())
            for tensor in model.parameters.values():
                dist.all_reduce(tensor)  # collectives of training go on
            background.settle()
            model = Model(Layout(2, 1, "no_shard"), dist.get_rank(), filled=True)
        again = Model(Layout(2, 1, "no_shard"), dist.get_rank(), filled=False)
        checkpoint.open(path).fill(checkpoint.targets_of(again.views()))
        return again.differs(model)
    finally:
        background.close()


def test_ranks_write_their_parts_and_rank_0_publishes(tmp_path: Path) -> None:
    assert run(_two_ranks, 2, tmp_path / "a.ckpt") == [[], []]
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def _one_fails(path: Path, what: str, victim: int) -> tuple[list[str], int]:
    background, model = AsyncSaver(), Model(Layout(2, 1, "no_shard"), dist.get_rank(), filled=True)
    told = []
    try:
        checkpoint.save(path, model.views(), common={"step": 0})
        for step in (1, 2):
            kill = what == "kill" and step == 1
            with fault("gate:/dev/null/never" if kill else what if step == 1 and dist.get_rank() == victim else ""):
                background.save(path, model.views(), common={"step": step})
            if kill and dist.get_rank() == victim:
                assert background._worker is not None
                background._worker.process.kill()
            try:
                background.settle()
            except CheckpointError as error:
                told.append(str(error))
            dist.barrier()
            assert checkpoint.open(path).common == {"step": 0 if step == 1 else step}
            dist.barrier()
        return told, len(workers_of(os.getpid()))
    finally:
        background.close()


@pytest.mark.parametrize(
    ("what", "cause", "victim"),
    [
        (f"error:{errno.ENOSPC}:1", "No space left on device", 0),
        (f"error:{errno.EIO}:3", "Input/output error", 1),
        ("kill", "died", 0),
        pytest.param(f"error:{errno.ENOSPC}:1", "No space left on device", 1, marks=pytest.mark.full),
        pytest.param(f"error:{errno.EIO}:3", "Input/output error", 0, marks=pytest.mark.full),
        pytest.param("kill", "died", 1, marks=pytest.mark.full),
    ],
)
def test_all_ranks_are_told_of_a_failure_and_save_again(tmp_path: Path, what: str, cause: str, victim: int) -> None:
    for told, workers in run(_one_fails, 2, tmp_path / "a.ckpt", what, victim):
        (message,) = told
        assert str(tmp_path / "a.ckpt") in message
        assert cause in message
        assert workers == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_value_that_cannot_be_kept_is_refused_at_once(tmp_path: Path, background: AsyncSaver) -> None:
    with pytest.raises(CheckpointError, match="common"):
        background.save(tmp_path / "a.ckpt", simple.views(simple.tensors(1)), common={"a": object()})
    assert not list(tmp_path.iterdir())
    simple.save(tmp_path / "a.ckpt", 1, background)
    background.settle()


def _cannot_give(path: Path) -> str:
    """Rank 0 cannot hand over its job, and rank 1's worker, which can, ends a second later than rank 0's."""
    background, model = AsyncSaver(), Model(Layout(2, 1, "no_shard"), dist.get_rank(), filled=True)
    end = background._end_worker

    def refuse(*_: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    def end_late() -> None:
        (folder,) = path.parent.glob("*.partial-*")
        time.sleep(1)
        assert folder.is_dir()
        end()

    if dist.get_rank() == 0:
        background._give = refuse  # type: ignore[method-assign]
    else:
        background._end_worker = end_late  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="no more processes") as told:
        background.save(path, model.views())
    background._end_worker = end  # type: ignore[method-assign]
    background.close()
    return str(told.value)


def test_a_folder_stays_until_no_worker_writes_into_it(tmp_path: Path) -> None:
    run(_cannot_give, 2, tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_worker_that_is_killed_between_saves_is_replaced(tmp_path: Path) -> None:
    background = AsyncSaver("persistent")
    simple.save(tmp_path / "a.ckpt", 1, background)
    background.settle()
    assert background._worker is not None
    background._worker.process.kill()
    background._worker.process.wait()
    simple.save(tmp_path / "a.ckpt", 2, background)
    background.settle()
    assert simple.step_of(tmp_path / "a.ckpt") == 2
    background.close()


def test_abort_kills_and_leaves_what_was_there(tmp_path: Path, background: AsyncSaver) -> None:
    path, gate = tmp_path / "a.ckpt", tmp_path / "gate"
    simple.save(path, 1)
    with fault(f"gate:{gate}"):
        simple.save(path, 2, background)
    background.abort()
    assert not workers_of(os.getpid())
    assert background.pending is None
    gate.touch()
    assert simple.step_of(path) == 1
    assert {each.name for each in tmp_path.iterdir()} == {"a.ckpt", "gate"}
    simple.save(path, 3, background)
    background.settle()
    assert simple.step_of(path) == 3


def test_abort_while_another_thread_settles(
    tmp_path: Path, background: AsyncSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each place where the thread that trains may be."""
    path, gate = tmp_path / "a.ckpt", tmp_path / "gate"
    with fault(f"gate:{gate}"):
        simple.save(path, 1, background)
    monkeypatch.setattr(saves.time, "sleep", lambda _: background.abort())  # it waits for its worker
    with pytest.raises(CheckpointError, match="aborted"):
        background.settle()
    monkeypatch.undo()
    together = Ranks.together

    def abort_after(*arguments: Any) -> Any:
        answers = together(*arguments)
        background.abort()
        return answers

    simple.save(path, 2, background)
    monkeypatch.setattr(Ranks, "together", abort_after)  # all ranks know that it is published
    assert background.settle().path == path
    monkeypatch.undo()
    assert simple.step_of(path) == 2
    assert not workers_of(os.getpid())


def test_signals_of_a_cluster_do_not_end_a_worker(tmp_path: Path, background: AsyncSaver) -> None:
    gate = tmp_path / "gate"
    with fault(f"gate:{gate}"):
        simple.save(tmp_path / "a.ckpt", 1, background)
    assert background._worker is not None
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(background._worker.process.pid, name)
    gate.touch()
    background.settle()
    assert simple.step_of(tmp_path / "a.ckpt") == 1


def test_a_checkpoint_is_removed_though_a_process_forked_during_its_save_lives(
    tmp_path: Path, background: AsyncSaver
) -> None:
    """As the workers of a data loader do, which hold all that was open when they were forked."""
    simple.save(tmp_path / "a.ckpt", 1, background)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = mp.get_context("fork").Process(target=signal.pause, daemon=True)
        child.start()
    try:
        background.settle()
        assert checkpoint.remove(tmp_path / "a.ckpt")
    finally:
        child.kill()
        child.join()


def test_waiting_alone_publishes_what_is_complete(tmp_path: Path, background: AsyncSaver) -> None:
    simple.save(tmp_path / "a.ckpt", 1, background)
    saved = background.settle_alone()
    assert saved is not None
    assert simple.step_of(tmp_path / "a.ckpt") == 1
    assert background.settle_alone() is None


def _left_alone(path: Path) -> bool:
    """Rank 1's worker dies; rank 0 does not hear of it from rank 1."""
    background, model = AsyncSaver(), Model(Layout(2, 1, "no_shard"), dist.get_rank(), filled=True)
    with fault("gate:/dev/null/never" if dist.get_rank() == 1 else ""):
        background.save(path, model.views())
    if dist.get_rank() == 1:
        deadline = time.monotonic() + 60
        while not list(path.parent.glob("*/parts/1.json.writing")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        background.abort()
    published = background.settle_alone() is not None
    background.close()
    return published


def test_rank_0_does_not_wait_for_the_part_of_a_dead_rank(tmp_path: Path) -> None:
    assert run(_left_alone, 2, tmp_path / "a.ckpt") == [False, False]
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_not_seen_on_other_machines_tells_of_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on file systems whose locks belong to one machine."""
    announcement = worker.announcement(tmp_path, 3)
    writing = tmp_path / "parts" / "3.json.writing"
    assert worker._alive(writing, 0.0)
    announcement.close()
    assert not worker._alive(writing, 0.0)
    monkeypatch.setattr(worker, "machine", lambda: "another")
    assert worker._alive(writing, 0.0)


def _save_until_killed(folder: Path, kind: Kind | None, told: Path) -> None:
    """Save step after step, beside or (None) not; write down the error of a save."""
    os.setpgid(0, 0)
    newest, background = checkpoint.latest(folder), None if kind is None else AsyncSaver(kind)
    try:
        for step in count(simple.step_of(newest) + 1 if newest else 1):
            for path in (folder / f"step={step}.ckpt", folder / "last.ckpt"):
                simple.save(path, step, background)
                if background is not None:
                    background.settle()
            checkpoint.remove(folder / f"step={step - 2}.ckpt")
    except CheckpointError as error:
        told.write_text(str(error))
        time.sleep(600)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _step(folder: Path) -> int:
    newest = checkpoint.latest(folder)
    return 0 if newest is None else simple.step_of(newest)


def _begun(folder: Path) -> int:
    """The newest step that has a folder."""
    return max(int(path.name.partition("=")[2].partition(".")[0]) for path in folder.glob("step=*"))


def _rounds(folder: Path, kind: Kind | None, seed: int, rounds: int) -> None:
    """Kill the trainer, or its worker, at random moments: the newest checkpoint is complete, no process remains."""
    draw, before, told = random.Random(seed), 0, folder.with_name("told")
    print(f"seed {seed}")  # pytest shows it when the test fails
    for _ in range(rounds):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
            trainer = mp.get_context("fork").Process(target=_save_until_killed, args=(folder, kind, told))
            trainer.start()
        assert trainer.pid is not None
        first = before + draw.randrange(1, 4)
        # Not that one: a trainer that is fast has removed it by the time this process looks.
        _wait(lambda first=first: _step(folder) >= first)
        time.sleep(draw.random() * 0.05)
        if victims := workers_of(trainer.pid) if draw.random() < 0.5 else []:
            os.kill(victims[0], signal.SIGKILL)
            # it is told of, or the worker had nothing to do any more
            _wait(lambda first=first: told.exists() or _begun(folder) >= first + 4)
        trainer.kill()
        trainer.join()
        wait_until_gone(trainer.pid)
        assert _step(folder) >= first > before
        if first > before + 1:  # otherwise this trainer may not have come to last.ckpt, nor the one before it
            assert simple.step_of(folder / "last.ckpt") >= first - 1
        before = _step(folder)
        told.unlink(missing_ok=True)
    simple.save(folder / "end.ckpt", before + 1)
    left = [path for path in folder.iterdir() if ".partial-" in path.name or ".old-" in path.name]
    assert all(map(checkpoint.is_complete, left))  # killed after the seal: such a folder is the checkpoint of its name


SEEDS: dict[Kind | None, int] = {"persistent": 12, "per_save": 11, None: 40}
"""How many seeds of eight kills each kind of save has in the full run: 504 kills. Slow kinds have fewer."""
CASES = [
    pytest.param(kind, seed, marks=[pytest.mark.full] if seed or kind == "per_save" else [])
    for kind, seeds in SEEDS.items()
    for seed in range(seeds + 1)
]


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_kills_at_random_moments_lose_nothing(tmp_path: Path, kind: Kind | None, seed: int) -> None:
    (tmp_path / "saves").mkdir()
    _rounds(tmp_path / "saves", kind, seed, 8 if seed else 3)
