"""A checkpoint that another save replaces while it is read is read to its end."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from megalight import checkpoint
from megalight.checkpoint.disk import storage
from megalight.errors import CheckpointError
from tests.checkpoint.simple import save, step_of, tensors, views


@pytest.mark.parametrize("swaps", [True, False])
def test_all_values_are_of_the_checkpoint_that_was_opened(
    swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(storage, "_swap", lambda one, other: False)
    path = tmp_path / "last.ckpt"
    save(path, 1)
    opened = checkpoint.open(path)
    for step in (2, 3):
        save(path, step)
    values = tensors(-1)
    opened.fill(checkpoint.targets_of(views(values)))
    assert all((value == 1).all() for value in values.values())
    assert opened.common["global_step"] == 1
    assert opened.file("tokenizer.json") == b"step 1"
    assert step_of(path) == 3
    # It does not come back under its name, and goes with the next save.
    assert checkpoint.remove(path)
    assert checkpoint.latest(tmp_path) is None
    opened.release()
    save(path, 4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_without_a_lock_it_is_an_error_and_never_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the moment between the rename of a save and its end, if that lasts."""
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    path = tmp_path / "last.ckpt"
    save(path, 1)
    lock = storage.locked(path)
    assert lock is not None
    opened = checkpoint.open(path)
    os.close(lock)
    save(path, 2)
    values = tensors(-1)
    with pytest.raises(CheckpointError, match="is missing"):
        opened.fill(checkpoint.targets_of(views(values)))
    assert all((value == -1).all() for value in values.values())


def test_a_removal_leaves_a_newer_one_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the lock of the folder that was there, and another run has put a new one in its place."""
    path, opened, real = tmp_path / "last.ckpt", list[checkpoint.Checkpoint](), storage.locked
    save(path, 1)

    def replaced(root: Path) -> int | None:
        lock = real(root)
        if not opened:
            with monkeypatch.context() as patch:
                patch.setattr(storage, "locked", real)
                save(path, 2)
            opened.append(checkpoint.open(path))
        return lock

    monkeypatch.setattr(storage, "locked", replaced)
    assert not checkpoint.remove(path)
    values = tensors(-1)
    opened[0].fill(checkpoint.targets_of(views(values)))
    assert all((value == 2).all() for value in values.values())
    opened[0].release()
    assert checkpoint.remove(path)
    assert not path.exists()


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("read", [False, True])
def test_a_removal_that_took_a_newer_one_puts_it_back(
    read: bool, newer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run replaces the folder between the check of the lock and the rename; and again, before it is back."""
    path, held, real, renames = (
        tmp_path / "last.ckpt",
        list[checkpoint.Checkpoint](),
        os.rename,
        list[tuple[str, str]](),
    )
    save(path, 1)

    def rename(source: Path, target: Path) -> None:
        renames.append((Path(source).name, Path(target).name.split("-")[0]))
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", real)
            if len(renames) == 1:
                save(path, 2)
                if read:
                    held.append(checkpoint.open(path))
            if len(renames) == 2:
                # Whoever asks for it now finds it under its other name.
                assert step_of(path) == 2
                assert [each.name for each in checkpoint.finished(tmp_path)] == ["last.ckpt"]
                if newer:
                    save(path, 3)
                    if read:
                        held.append(checkpoint.open(path))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    gone = checkpoint.remove(path)
    assert renames[:2] == [("last.ckpt", "last.ckpt.old"), (renames[1][0], "last.ckpt")]
    # With a reader it stays. Without one, the removal goes on with what is there now.
    assert gone == (not read)
    for step, opened in enumerate(held, 2):
        values = tensors(-1)
        opened.fill(checkpoint.targets_of(views(values)))
        assert all((value == step).all() for value in values.values())
    if read:
        assert step_of(path) == 2 + newer
    for opened in held:
        opened.release()
    assert checkpoint.remove(path)
    assert checkpoint.latest(tmp_path) is None
    save(path, 4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_errors_name_the_path_that_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    opened = checkpoint.open(path)
    (path / "data" / "0-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"checkpoint {path} is torn: data/0-0.safetensors is missing"):
        opened.fill(checkpoint.targets_of(views(tensors(-1))))


def test_reading_beside_a_save_that_never_ends(tmp_path: Path) -> None:
    path, stop, steps = tmp_path / "last.ckpt", threading.Event(), []
    save(path, 1)

    def replace() -> None:
        step = 2
        while not stop.is_set():
            save(path, step)
            step += 1

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        while len(steps) < 40:
            steps.append(step_of(path))  # everything in it agrees
    finally:
        stop.set()
        writer.join()
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]
    assert step_of(path) >= steps[-1]
