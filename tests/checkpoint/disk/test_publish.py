"""A save that dies or fails at any moment leaves a usable checkpoint; leftovers are told apart and cleaned."""

from __future__ import annotations

import datetime
import errno
import multiprocessing as mp
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megalight import checkpoint
from megalight.checkpoint.disk import files, manifest, publish, storage
from megalight.errors import CheckpointError
from tests.checkpoint import simple
from tests.checkpoint.faults import Faults
from tests.support.workers import meeting, run

ERRORS = [OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EIO, errno.EROFS)]


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


@pytest.mark.parametrize("swap", [pytest.param(True, marks=pytest.mark.full), False])
def test_replacing_survives_a_kill_at_any_call(
    swap: bool, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swap:
        monkeypatch.setattr(storage, "_swap", lambda *_: False)
    path = tmp_path / "last.ckpt"
    simple.save(path, 1)
    deaths, seen = 0, set()
    for _ in faults.kills(lambda: simple.save(path, 2)):
        deaths += 1
        if swap:
            assert path.is_dir()
        assert checkpoint.latest(tmp_path) == path
        step = simple.step_of(path)
        seen.add(step)
        if step == 2:
            simple.save(path, 1)
    assert deaths > 30
    assert seen == {1, 2}
    simple.save(path, 3)
    assert names(tmp_path) == {"last.ckpt"}
    assert simple.step_of(path) == 3


@pytest.mark.full
def test_a_first_save_survives_a_kill_at_any_call(faults: Faults, tmp_path: Path) -> None:
    simple.save(tmp_path / "1.ckpt", 1)
    for _ in faults.kills(lambda: simple.save(tmp_path / "2.ckpt", 2)):
        newest = checkpoint.latest(tmp_path)
        assert newest is not None
        assert simple.step_of(newest) == int(newest.stem)
        checkpoint.remove(tmp_path / "2.ckpt")
    assert simple.step_of(tmp_path / "2.ckpt") == 2
    checkpoint.remove(tmp_path / "2.ckpt")
    simple.save(tmp_path / "1.ckpt", 3)
    assert names(tmp_path) == {"1.ckpt"}


def test_removal_survives_a_kill_at_any_call(faults: Faults, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    simple.save(path, 1)
    for _ in faults.kills(lambda: checkpoint.remove(path)):
        # Also under the name that it has for a moment.
        if checkpoint.is_complete(path):
            assert simple.step_of(path) == 1
            assert checkpoint.latest(tmp_path) == path
        else:
            assert checkpoint.latest(tmp_path) is None
            simple.save(path, 1)
            assert names(tmp_path) == {"a.ckpt"}
    checkpoint.remove(path)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error.errno])
def test_a_failing_disk_is_one_error_and_leaves_the_old_checkpoint(
    error: OSError, faults: Faults, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    simple.save(path, 1)
    faults.fail(0, error)
    simple.save(path, 1)
    failures, calls = 0, faults.count
    for at in range(1, calls + 1):
        faults.fail(at, error)
        message = outcome(path)
        failures += bool(message)
        assert error.strerror in message or not message
        step = simple.step_of(path)
        if not message:
            assert step == 2  # the call was part of cleaning up
        if step == 2:
            simple.save(path, 1)
    assert failures > 20
    simple.save(path, 3)
    assert names(tmp_path) == {"a.ckpt"}


def outcome(path: Path) -> str:
    try:
        simple.save(path, 2)
    except CheckpointError as error:
        return str(error)
    return ""


def fail_on_one_rank(path: Path) -> str:
    write = os.write
    if dist.get_rank() == 1:
        os.write = lambda *_: (_ for _ in ()).throw(ERRORS[0])
    try:
        with pytest.raises(CheckpointError) as error:
            simple.save(path, 2)
    finally:
        os.write = write
    return str(error.value)


def test_one_rank_that_fails_fails_all(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    simple.save(path, 1)
    for message in run(fail_on_one_rank, 2, path):
        assert "rank 1" in message
        assert "No space left" in message
    assert names(tmp_path) == {"a.ckpt"}
    assert simple.step_of(path) == 1


def save_and_die(rank: int, place: str, path: Path) -> None:
    """Exit with 3 after a clear error; rank 1 dies in its first write."""
    dist.init_process_group("gloo", place, datetime.timedelta(seconds=30), 2, rank)
    if rank == 1:
        os.write = lambda *_: os._exit(9)
    try:
        simple.save(path, 2)
    except CheckpointError:
        os._exit(3)
    os._exit(0)


@pytest.mark.full
def test_a_rank_that_dies_fails_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    simple.save(path, 1)
    context, place = mp.get_context("spawn"), meeting()
    processes = [context.Process(target=save_and_die, args=(rank, place, path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    assert [process.exitcode for process in processes] == [3, 9]
    assert names(tmp_path) == {"a.ckpt"}
    assert simple.step_of(path) == 1


def bad_rank_state(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        checkpoint.save(path, {}, rank_state={"a": [object()] if dist.get_rank() == 1 else 1})
    return str(error.value)


def test_what_cannot_be_kept_fails_all_before_anything_is_written(tmp_path: Path) -> None:
    for message in run(bad_rank_state, 2, tmp_path / "a.ckpt"):
        assert "rank_state['a'][0]" in message
    assert names(tmp_path) == set()


def kill_rounds(directory: Path, rounds: int) -> None:
    safe = 0
    for _ in range(rounds):
        command = [sys.executable, "-m", "tests.checkpoint.killed", str(directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            safe = max(safe, int(child.stdout.readline()))
            time.sleep(random.uniform(0, 0.2))
            child.kill()
            rest, errors = child.communicate()
        assert not errors
        safe = max([safe, *map(int, rest.split())])
        newest = checkpoint.latest(directory)
        assert newest is not None
        assert simple.step_of(newest) >= safe
        assert (directory / "last.ckpt").is_dir()
        for path in checkpoint.finished(directory):
            assert simple.step_of(path) <= simple.step_of(newest)
    simple.save(directory / "last.ckpt", safe + 5)
    left = [directory / name for name in names(directory) if not name.endswith(".ckpt")]
    assert all(map(checkpoint.is_complete, left))  # killed after the seal: such a folder is the checkpoint of its name


@pytest.mark.full
def test_killed_at_random_moments(tmp_path: Path) -> None:
    kill_rounds(tmp_path, 20)


def test_a_save_under_way_is_left_alone(tmp_path: Path) -> None:
    busy = publish.Save(tmp_path / "busy.ckpt")
    (tmp_path / f"dead.ckpt.partial-{storage._token()}0123abcd").mkdir()
    simple.save(tmp_path / "a.ckpt", 1)
    assert names(tmp_path) == {"a.ckpt", busy.folder.name}
    busy.discard()
    assert names(tmp_path) == {"a.ckpt"}


def test_a_sealed_folder_is_read_only_when_its_save_is_dead(tmp_path: Path) -> None:
    """A living save renames it next, and readers would lose it by its temporary name."""
    path = tmp_path / "a.ckpt"
    simple.save(path, 1)
    partial = publish.Save(tmp_path / "b.ckpt")
    shutil.copytree(path, partial.folder, dirs_exist_ok=True)
    assert not checkpoint.is_complete(tmp_path / "b.ckpt")
    assert checkpoint.latest(tmp_path) == path
    partial.release()  # as the system does when a process dies
    assert simple.step_of(tmp_path / "b.ckpt") == 1


def test_without_locks_only_leftovers_of_the_same_path_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no locks")))
    for name in ("a.ckpt.partial-0123456789abcdef", "b.ckpt.partial-0123456789abcdef"):
        (tmp_path / name).mkdir()
    simple.save(tmp_path / "a.ckpt", 1)
    assert names(tmp_path) == {"a.ckpt", "b.ckpt.partial-0123456789abcdef"}


def test_a_folder_of_another_machine_is_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock may be one that this machine does not see."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(storage, "machine", lambda: "another")
        partial = publish.Save(tmp_path / "b.ckpt")
        partial.release()  # as it looks from here
    (partial.folder / "data").mkdir()
    simple.save(tmp_path / "a.ckpt", 1)
    assert names(tmp_path) == {"a.ckpt", partial.folder.name}
    old = time.time() - storage.ABANDONED_SECONDS - 60
    os.utime(partial.folder, (old, old))
    simple.save(tmp_path / "a.ckpt", 2)
    assert names(tmp_path) == {"a.ckpt", partial.folder.name}  # somebody has written inside since
    os.utime(partial.folder / "data", (old, old))
    simple.save(tmp_path / "a.ckpt", 3)
    assert names(tmp_path) == {"a.ckpt"}


def test_latest_is_the_newest_even_when_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simple.save(tmp_path / "b.ckpt", 1)
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    simple.save(tmp_path / "a.ckpt", 2)
    assert checkpoint.latest(tmp_path) == tmp_path / "a.ckpt"
    assert [path.stem for path in checkpoint.finished(tmp_path)] == ["b", "a"]


def test_latest_of_nothing(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    (tmp_path / "not a checkpoint").mkdir()
    assert checkpoint.latest(tmp_path) is None
    checkpoint.remove(tmp_path / "nowhere")


def test_a_linked_checkpoint_is_removed_as_a_link(tmp_path: Path) -> None:
    simple.save(tmp_path / "a.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    assert simple.step_of(tmp_path / "last.ckpt") == 1
    simple.save(tmp_path / "last.ckpt", 2)
    assert simple.step_of(tmp_path / "a.ckpt") == 1
    assert simple.step_of(tmp_path / "last.ckpt") == 2
    (tmp_path / "link.ckpt").symlink_to("a.ckpt")
    checkpoint.remove(tmp_path / "link.ckpt")
    assert names(tmp_path) == {"a.ckpt", "last.ckpt"}


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_text("precious")
    with pytest.raises(CheckpointError, match="not a folder"):
        simple.save(tmp_path / "a.ckpt", 1)
    assert (tmp_path / "a.ckpt").read_text() == "precious"


@pytest.mark.parametrize("name", ["ünï cødé.ckpt", "step=1-val_loss=0.5[a]*.ckpt", "x" * 230])
def test_odd_path_names(name: str, tmp_path: Path) -> None:
    for step in (1, 2):
        simple.save(tmp_path / name, step)
    assert simple.step_of(tmp_path / name) == 2
    assert names(tmp_path) == {name}


def test_files_that_other_ranks_wrote_elsewhere_are_missed(tmp_path: Path) -> None:
    record = files.FileRecord(3, "")
    with pytest.raises(CheckpointError, match=r"data/1-0\.safetensors is missing"):
        manifest.check_files(tmp_path, manifest.Manifest({"data/1-0.safetensors": record}, 0, 2, {}, ""))


def test_a_folder_that_goes_while_it_is_locked_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run removes it between the lock and the look at what is locked."""
    folder = tmp_path / "a.ckpt"
    folder.mkdir()
    locked = storage.locked

    def vanishing(root: Path) -> int | None:
        found = locked(root)
        os.rmdir(root)
        return found

    monkeypatch.setattr(storage, "locked", vanishing)
    before = len(os.listdir("/proc/self/fd"))
    assert publish.remove(folder)
    assert len(os.listdir("/proc/self/fd")) == before
