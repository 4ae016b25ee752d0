"""Checkpoints in remote storage: in memory, and in a server of objects on this machine."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any
from uuid import uuid4

import pytest
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem

from megalight import checkpoint
from megalight.checkpoint.async_save import worker
from megalight.checkpoint.async_save.saves import KINDS, AsyncSaver, Kind
from megalight.checkpoint.disk import object_store, publish, storage
from megalight.checkpoint.disk.address import Address
from megalight.checkpoint.disk.files import FileRecord, write_file
from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.checkpoint.disk.rank_files import WrittenFiles
from megalight.checkpoint.inspection import describe, diff, verify
from megalight.cli import checkpoints
from megalight.errors import CheckpointError, MegalightError, StorageError
from tests.checkpoint import simple
from tests.checkpoint.async_workers import fault, workers_of
from tests.checkpoint.layouts import Layout, Model
from tests.support.objects import BUCKET, server, use  # noqa: F401 (a fixture)
from tests.support.workers import run


@pytest.fixture
def objects(server: str) -> Address:  # noqa: F811
    """A folder of its own in the server."""
    return Address(f"s3://{BUCKET}/{uuid4().hex}")


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.full)])
def folder(request: pytest.FixtureRequest) -> Iterator[Address]:
    """A folder of its own, in memory and in the server."""
    made = Address(f"memory://{uuid4().hex}") if request.param == "memory" else request.getfixturevalue("objects")
    yield made
    publish.delete(made)


def names(folder: Address) -> list[str]:
    """Every object, by its path in the folder, with ``*`` for tokens."""
    found = folder.store.find(folder.key)
    parts = (name.removeprefix(folder.key + "/").split("/") for name in found)
    return sorted("/".join("*" if part.startswith("save-") else part for part in each) for each in parts)


def one(name: str) -> list[str]:
    held = ("common.json", "common.safetensors", "data/0-0.safetensors", "files/tokenizer.json", "index.json")
    return sorted(f"{name}/*/{file}" for file in (*held, "manifest.json", "ranks/0.json", "ranks/0.safetensors"))


@pytest.mark.parametrize("folder", ["memory", "s3"], indirect=True)
def test_it_is_saved_found_replaced_and_removed(folder: Address) -> None:
    assert checkpoint.latest(folder) is None
    for step in (1, 2):
        simple.save(folder / "last.ckpt", step)
        assert simple.step_of(folder / "last.ckpt") == step
        assert names(folder) == one("last.ckpt")
    simple.save(folder / "b.ckpt", 3)
    assert checkpoint.finished(folder) == [folder / "last.ckpt", folder / "b.ckpt"]
    assert checkpoint.latest(str(folder)) == folder / "b.ckpt"
    assert checkpoint.is_complete(str(folder / "b.ckpt"))
    assert checkpoint.remove(str(folder / "b.ckpt"))
    assert checkpoint.remove(str(folder / "b.ckpt"))
    assert checkpoint.finished(folder) == [folder / "last.ckpt"]
    with pytest.raises(CheckpointError, match=r"b\.ckpt.*nothing is there.*last\.ckpt"):
        checkpoint.open(str(folder / "b.ckpt"))


def test_the_newest_of_a_run_is_found(folder: Address) -> None:
    for step, name in enumerate(("run/version_0/checkpoints/a.ckpt", "run/version_1/checkpoints/b.ckpt", "c.ckpt")):
        simple.save(folder / name, step)
    assert latest_checkpoint(str(folder / "run")) == folder / "run/version_1/checkpoints/b.ckpt"
    assert latest_checkpoint(str(folder / "c.ckpt")) == folder / "c.ckpt"
    assert checkpoints.resolve("last", "fit", [str(folder)]) == str(folder / "c.ckpt")
    damaged = publish.resolve(folder / "c.ckpt") / "data/0-0.safetensors"
    flip(damaged)
    assert checkpoints.resolve("auto", "fit", [str(folder)]) == str(folder / "run/version_1/checkpoints/b.ckpt")
    assert checkpoints.resolve("auto", "fit", [str(folder / "nothing")]) is None


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_folders_in_one_of_the_same_name_are_found(folder: Address) -> None:
    simple.save(folder / "run/run/run", 1)
    assert list((folder / "run").iterdir()) == [folder / "run/run"]
    assert latest_checkpoint(str(folder / "run")) == folder / "run/run/run"


def flip(file: Address, place: int = -5) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.store.pipe_file(file.key, bytes(data))


def test_damage_is_named_and_contents_are_shown(folder: Address) -> None:
    for name, step in (("a.ckpt", 1), ("b.ckpt", 1), ("c.ckpt", 2)):
        simple.save(folder / name, step)
    report = describe(folder / "a.ckpt", norms=True)
    assert report.progress["global_step"] == 1
    assert report.norms["c.bias"] == pytest.approx(1000**0.5)
    assert diff(folder / "a.ckpt", folder / "b.ckpt") == []
    assert {each.name for each in diff(folder / "a.ckpt", folder / "c.ckpt")} == set(simple.SHAPES)
    assert verify(folder / "a.ckpt") == []
    root = publish.resolve(folder / "a.ckpt")
    for name in ("data/0-0.safetensors", "common.json", "ranks/0.safetensors"):
        flip(root / name)
    assert {damage.file for damage in verify(folder / "a.ckpt")} == {
        "data/0-0.safetensors",
        "common.json",
        "ranks/0.safetensors",
    }
    with pytest.raises(CheckpointError, match="torn"):
        simple.step_of(folder / "a.ckpt")
    (root / "index.json").store.rm((root / "index.json").key)
    with pytest.raises(CheckpointError, match=r"index\.json is missing.*c\.ckpt"):
        checkpoint.open(folder / "a.ckpt")


def test_formats_of_torch_are_kept_there_too(folder: Address) -> None:
    views = simple.views(simple.tensors(4))
    checkpoint.save(folder / "a.ckpt", views, scheme="fsdp_dtensor")
    values = simple.tensors(0)
    checkpoint.open(folder / "a.ckpt").fill(checkpoint.targets_of(simple.views(values)))
    assert all((value == 4).all() for value in values.values())
    assert verify(folder / "a.ckpt") == []


class Killed(BaseException):
    """The end of a process, after which nothing is cleaned up."""


class Deadly:
    """A store in which the process dies at the n-th change."""

    def __init__(self, store: Any, at: int, died: list[int]) -> None:
        self._store, self._at, self._died = store, at, died

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        if name not in ("open", "rm", "rm_file"):
            return call

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._died.append(1)
            if len(self._died) >= self._at:
                raise Killed
            return call(*args, **kwargs)

        return counted


def killed_at(at: int, work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Do the work in a process that dies at the n-th change of the store. False: it ends before."""
    died: list[int] = []
    store = Address.store.fget
    with monkeypatch.context() as patch:
        patch.setattr(Address, "store", property(lambda self: Deadly(store(self), at, died)))
        try:
            work()
        except Killed:
            return True
    return False


def test_a_kill_between_parts_loses_nothing(folder: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each moment there is the checkpoint from before or the new one; the next save cleans up."""
    path = folder / "last.ckpt"
    simple.save(path, 1)
    seen = set()
    for at in count(1):
        if not killed_at(at, lambda: simple.save(path, 2), monkeypatch):
            break
        step = simple.step_of(path)
        seen.add(step)
        assert checkpoint.latest(folder) == path
        simple.save(path, 1)
        assert simple.step_of(path) == 1
        assert names(folder) == one("last.ckpt")
    assert seen == {1, 2}
    assert at > 10  # eight files, and what was there before
    for at in count(1):
        if not killed_at(at, lambda: checkpoint.remove(path), monkeypatch):
            break
        assert checkpoint.latest(folder) in (path, None)
        simple.save(path, 1)
        assert names(folder) == one("last.ckpt")
    assert names(folder) == []


def test_leftovers_of_others_go_after_a_day(folder: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(storage, "machine", lambda: "another")
        assert killed_at(4, lambda: simple.save(folder / "a.ckpt", 1), monkeypatch)
    left = names(folder)
    assert left
    simple.save(folder / "b.ckpt", 1)
    assert names(folder) == sorted(left + one("b.ckpt"))  # it may be under way
    now = time.time()
    monkeypatch.setattr(object_store.time, "time", lambda: now + storage.ABANDONED_SECONDS + 60)
    simple.save(folder / "b.ckpt", 2)
    assert names(folder) == one("b.ckpt")


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_leftovers_do_not_pile_up(folder: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed again and again saves and removes another path each time: the next save cleans up."""
    left = 0
    for at in range(1, 9):
        assert killed_at(at, lambda path=folder / f"{at}.ckpt": simple.save(path, 1), monkeypatch)  # type: ignore[misc]
        simple.save(folder / "old.ckpt", 1)
        assert names(folder) == one("old.ckpt")
        # without its manifest, and with some of its files
        killed_at(at, lambda: checkpoint.remove(folder / "old.ckpt"), monkeypatch)
        left += bool(names(folder))
        simple.save(folder / "new.ckpt", 1)
        assert names(folder) == (one("new.ckpt") if at > 1 else sorted(one("new.ckpt") + one("old.ckpt")))
        for name in ("old.ckpt", "new.ckpt"):
            checkpoint.remove(folder / name)
    assert left > 1


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_a_save_that_ends_meanwhile_is_no_leftover(folder: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process publishes it and ends while another looks for leftovers."""
    simple.save(folder / "a.ckpt", 1)
    (save,) = object_store._saves(folder / "a.ckpt")
    manifest = save / "manifest.json"
    contents = manifest.read_bytes()
    manifest.store.rm_file(manifest.key)  # not published yet

    def ended(found: Address) -> bool:
        if found == save:
            write_file(manifest, contents)
        return found == save

    monkeypatch.setattr(object_store, "_dead", ended)
    simple.save(folder / "b.ckpt", 1)
    assert simple.step_of(folder / "a.ckpt") == 1


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
@pytest.mark.parametrize("question", ["_dead", "_sealed"])
def test_a_save_of_the_same_path_may_end_meanwhile(
    folder: Address, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run publishes it, newer than what is there, after any question about it. Only then it is the checkpoint."""
    path = folder / "a.ckpt"
    for step in (1, 2):
        simple.save(folder / f"{step}", step)
        (save,) = object_store._saves(folder / f"{step}")
        path.store.mv(save.key, f"{path.key}/{save.name}", recursive=True)
    other = path / save.name
    manifest = other / "manifest.json"
    contents, sealed, asked = manifest.read_bytes(), object_store._sealed, 0
    answers = {"_dead": lambda save: asked >= at and save == other, "_sealed": sealed}

    def ends(found: Address) -> bool:
        nonlocal asked
        answer: bool = answers[question](found)
        asked += found == other
        if asked == at and not manifest.exists():
            write_file(manifest, contents)  # and its process ends
        return answer

    for name, answer in {**answers, question: ends}.items():
        monkeypatch.setattr(object_store, name, answer)
    for at in range(1, 9):
        manifest.store.rm_file(manifest.key)  # not published yet
        asked = 0
        publish.recover(path)
        if asked < at:
            break
        assert simple.step_of(path) == 2
    assert at > 1


def test_a_removal_leaves_what_another_run_is_writing(folder: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "a.ckpt"
    simple.save(path, 1)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(storage, "machine", lambda: "another")
        partial = publish.Save(path)
    write_file(partial.folder / "data/0-0.safetensors", b"half")
    assert checkpoint.remove(path)
    assert names(folder) == ["a.ckpt/*/data/0-0.safetensors"]
    assert not checkpoint.is_complete(path)
    now = time.time()
    monkeypatch.setattr(object_store.time, "time", lambda: now + storage.ABANDONED_SECONDS + 60)
    assert checkpoint.remove(path)
    assert not path.exists()


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_a_save_under_way_costs_others_one_question(folder: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each of its files, which are many on many ranks."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(storage, "machine", lambda: "another")
        partial = publish.Save(folder / "a.ckpt")
    for rank in range(50):
        write_file(partial.folder / f"data/{rank}-0.safetensors", b"half")
    asked, ask = [], Address.ask

    def counted(self: Address, question: str, *args: Any, **options: Any) -> Any:
        asked.append(question)
        return ask(self, question, *args, **options)

    monkeypatch.setattr(Address, "ask", counted)
    simple.save(folder / "b.ckpt", 1)
    assert asked.count("modified") == 1


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_names_are_no_patterns(folder: Address) -> None:
    """``rm`` of fsspec would take run[1] for run1."""
    for name in ("run1/a.ckpt", "run[1]/a.ckpt", "run[1]/a.ckpt"):
        simple.save(folder / name, 1)
    assert names(folder) == one("run1/a.ckpt") + one("run[1]/a.ckpt")
    checkpoint.remove(folder / "run[1]/a.ckpt")
    assert names(folder) == one("run1/a.ckpt")


def test_a_store_that_fails_is_told_of(folder: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "a.ckpt"
    simple.save(path, 1)
    kind = type(path.store)
    send = kind.open

    def refuse(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name.endswith("index.json"):
            raise OSError(28, "quota exceeded")
        return send(self, name, *args, **kwargs)

    monkeypatch.setattr(kind, "open", refuse)
    with pytest.raises(CheckpointError, match=r"saving .*a\.ckpt failed|publishing .*quota exceeded"):
        simple.save(path, 2)
    monkeypatch.undo()
    assert simple.step_of(path) == 1
    assert names(folder) == one("a.ckpt")


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_what_was_before_may_stay_until_the_next_save(folder: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store fails when the save before is deleted: the new one is published, and stays."""
    path = folder / "a.ckpt"
    simple.save(path, 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(5, "slow down")

    with monkeypatch.context() as patch:
        patch.setattr(type(path.store), "rm", refuse)
        simple.save(path, 2)
    assert simple.step_of(path) == 2
    simple.save(path, 3)
    assert simple.step_of(path) == 3
    assert names(folder) == one("a.ckpt")


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_a_published_save_is_not_discarded(folder: Address) -> None:
    """An abort, or the death of a worker, may come after the manifest, when what was before is gone."""
    path = folder / "a.ckpt"
    simple.save(path, 1)
    partial = publish.Save(path)
    saved = publish.resolve(path)
    path.store.mv(saved.key, partial.folder.key, recursive=True)
    partial.discard()
    assert simple.step_of(path) == 1


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_a_store_that_does_not_answer_is_not_empty(folder: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would start anew for that, and a save would take what is there for leftovers."""
    path, other = folder / "a.ckpt", folder / "b.ckpt"
    for each in (path, other):
        simple.save(each, 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.latest(folder),
        lambda: checkpoint.is_complete(path),
        lambda: checkpoints.resolve("auto", "fit", [str(folder)]),
        lambda: checkpoint.open(path),
        lambda: verify(path),
    ]
    for question in ("info", "ls", "cat_file", "find"):
        with monkeypatch.context() as patch:
            patch.setattr(type(path.store), question, refuse)
            # What is asked by no call of these is not needed for it.
            for call in calls[:-2] if question == "find" else calls:
                with pytest.raises(StorageError, match="ConnectionError: no route to host"):
                    call()
            with pytest.raises(MegalightError, match="no route to host"):
                simple.save(path, 2)
    assert [simple.step_of(each) for each in (path, other)] == [1, 1]
    simple.save(path, 3)
    assert names(folder) == one("a.ckpt") + one("b.ckpt")


WRITER = """
import sys
from megalight.checkpoint.disk import publish
from megalight.checkpoint.disk.files import write_file
partial = publish.Save(publish.place(sys.argv[1]))
write_file(partial.folder / "data/0-0.safetensors", b"half")
print(partial.folder, flush=True)
sys.stdin.read()
"""


def test_a_save_of_another_run_is_no_leftover_while_it_lives(objects: Address) -> None:
    """Two runs save the same path: neither deletes what the other is writing."""
    words, path = [sys.executable, "-c", WRITER, str(objects / "a.ckpt")], objects / "a.ckpt"
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        begun = Address(other.stdout.readline().strip())
        simple.save(path, 1)
        assert [each.name for each in begun.iterdir()] == ["data"]
        assert simple.step_of(path) == 1
        other.kill()
        other.wait()
        simple.save(path, 2)
        assert names(objects) == one("a.ckpt")


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_a_save_of_another_machine_is_a_leftover_after_a_day(folder: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(storage, "machine", lambda: "another")
        assert killed_at(4, lambda: simple.save(folder / "a.ckpt", 1), monkeypatch)
    left = names(folder)
    simple.save(folder / "a.ckpt", 1)
    assert names(folder) == sorted(left + one("a.ckpt"))
    now = time.time()
    monkeypatch.setattr(object_store.time, "time", lambda: now + storage.ABANDONED_SECONDS + 60)
    simple.save(folder / "a.ckpt", 2)
    assert names(folder) == one("a.ckpt")


def test_listings_that_others_keep_are_dropped(objects: Address) -> None:
    """ModelCheckpoint asks a store that keeps its listings."""
    simple.save(objects / "a.ckpt", 1)
    theirs = get_filesystem(str(objects))
    assert len(theirs.ls(str(objects))) == 1
    simple.save(objects / "b.ckpt", 2)
    publish.forget_listings(objects / "b.ckpt")
    assert len(theirs.ls(str(objects))) == 2


def test_copies_of_a_store_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"simplecache, a copy on this machine.* s3://bucket/run"):
        publish.place("simplecache::s3://bucket/run")


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_two_saves_of_a_path_leave_the_newer(folder: Address) -> None:
    """Two runs that write the same path may both write their manifests before either deletes."""
    path, both = folder / "a.ckpt", [folder / f"a.ckpt/save-{number}" for number in (1, 0)]
    for step, save in enumerate(both):
        simple.save(folder / "b.ckpt", step)
        found = publish.resolve(folder / "b.ckpt")
        path.store.mv(found.key, save.key, recursive=True)
    for save in both:
        publish.publish(save, path)
    assert simple.step_of(path) == 1
    assert names(folder) == one("a.ckpt")


def test_a_folder_that_was_copied_there_is_a_checkpoint(folder: Address, tmp_path: Any) -> None:
    simple.save(tmp_path / "a.ckpt", 1)
    folder.store.put(str(tmp_path / "a.ckpt"), f"{folder.key}/a.ckpt", recursive=True)
    assert simple.step_of(folder / "a.ckpt") == 1
    root = publish.resolve(folder / "a.ckpt")
    root.store.get(root.key, str(tmp_path / "b.ckpt"), recursive=True)
    assert simple.step_of(tmp_path / "b.ckpt") == 1


def test_a_save_deletes_what_was_copied_there(folder: Address, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files alone; a deletion that is cut short is ended by the next save."""
    path = folder / "a.ckpt"
    simple.save(tmp_path / "a.ckpt", 1)
    real, deleted = path.store.rm_file, list[str]()

    def twice(key: str) -> None:
        if len(deleted) == 2:
            raise OSError(errno.EIO, "the store does not answer")
        deleted.append(key)
        real(key)

    for cut in (False, True):
        publish.delete(path)
        folder.store.put(str(tmp_path / "a.ckpt"), f"{folder.key}/a.ckpt", recursive=True)
        write_file(path / "data" / "notes.txt", b"mine")
        with monkeypatch.context() as patch:
            if cut:
                patch.setattr(path.store, "rm_file", twice)
            simple.save(path, 2)
        assert simple.step_of(path) == 2
        assert (len(names(folder)) > len(one("a.ckpt")) + 1) == cut
        simple.save(path, 3)
        assert simple.step_of(path) == 3
        assert names(folder) == sorted([*one("a.ckpt"), "a.ckpt/data/notes.txt"])
    assert len(deleted) == 2


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_a_copied_one_that_is_newer_stays(folder: Address, tmp_path: Any) -> None:
    """Two people at one path: what was saved last is the checkpoint."""
    path = folder / "a.ckpt"
    partial = publish.Save(path)
    simple.save(folder / "b.ckpt", 1)
    folder.store.mv(publish.resolve(folder / "b.ckpt").key, partial.folder.key, recursive=True)
    simple.save(tmp_path / "a.ckpt", 2)
    folder.store.put(f"{tmp_path}/a.ckpt/", f"{path.key}/", recursive=True)
    partial.publish()
    assert simple.step_of(path) == 2


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[1:])])
def test_saves_beside_training(objects: Address, kind: Kind) -> None:
    background, path = AsyncSaver(kind), objects / "a.ckpt"
    try:
        for step in (1, 2):
            simple.save(path, step, background)
            background.settle()
            assert simple.step_of(path) == step
        with fault("gate:/dev/null/never"):  # of the next worker
            background.abort()
            simple.save(path, 3, background)
        assert background._worker is not None
        background._worker.process.kill()
        with pytest.raises(CheckpointError, match="died"):
            background.settle()
        assert simple.step_of(path) == 2
        assert names(objects) == one("a.ckpt")
        simple.save(path, 4, background)
        background.settle()
        assert simple.step_of(path) == 4
    finally:
        background.close()
    assert not workers_of(os.getpid())


def _two_ranks(url: str, address: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        use(address, patch)
        background, layout = AsyncSaver(), Layout(2, 1, "no_shard")
        try:
            model = Model(layout, dist.get_rank(), filled=True)
            background.save(url, model.views())
            background.settle()
            again = Model(layout, dist.get_rank(), filled=False)
            checkpoint.open(url).fill(checkpoint.targets_of(again.views()))
            return again.differs(model)
        finally:
            background.close()


@pytest.mark.full
def test_workers_of_two_ranks_meet_there(objects: Address, server: str) -> None:  # noqa: F811
    assert run(_two_ranks, 2, str(objects / "a.ckpt"), server) == [[], []]
    assert "a.ckpt/*/manifest.json" in names(objects)
    assert not [name for name in names(objects) if "/parts/" in name]


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_a_store_tells_what_each_rank_has_written(folder: Address) -> None:
    parts = [WrittenFiles({f"data/{rank}-0": FileRecord(rank, "0")}, (), ()) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        found = pool.submit(worker.collect, folder, 3)
        for rank in (2, 0, 1):
            assert not found.done()
            worker.announcement(folder, rank).tell(parts[rank])
        assert found.result(60) == parts
    assert names(folder) == []
    worker.announcement(folder, 0).tell("no space left")
    with pytest.raises(CheckpointError, match="rank 0: no space left"):
        worker.collect(folder, 1)


def _cannot_begin(url: str, address: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        use(address, patch)
        background, model = AsyncSaver(), Model(Layout(2, 1, "no_shard"), dist.get_rank(), filled=True)
        try:
            with patch.context() as failing:
                if dist.get_rank() == 1:
                    failing.setattr(background, "_give", lambda *_: _refuse())
                with pytest.raises(CheckpointError, match="no more processes") as told:
                    background.save(url, model.views())
            dist.barrier()
            background.save(url, model.views())
            background.settle()
            return str(told.value)
        finally:
            background.close()


def _refuse() -> None:
    raise OSError(errno.EAGAIN, "no more processes")


def test_what_could_not_begin_leaves_nothing_there(objects: Address, server: str) -> None:  # noqa: F811
    first, second = run(_cannot_begin, 2, str(objects / "a.ckpt"), server)
    assert first == second
    folders = {name.rsplit("/", 2)[0] for name in objects.store.find(objects.key) if name.endswith(".safetensors")}
    assert len({name.partition("/save-")[2].partition("/")[0] for name in folders}) == 1
    assert "a.ckpt/*/manifest.json" in names(objects)


def test_what_a_worker_writes_after_an_abort_goes_with_the_next_save(objects: Address) -> None:
    """Another rank's, which is killed a moment later than rank 0 has deleted the folder."""
    background = AsyncSaver()
    try:
        simple.save(objects / "a.ckpt", 1, background)
        assert background.pending is not None
        assert background.pending.partial is not None
        folder = background.pending.partial.folder
        background.abort()
        write_file(folder / "data" / "1-0.safetensors", b"late")
        simple.save(objects / "b.ckpt", 2, background)
        background.settle()
    finally:
        background.close()
    assert names(objects) == one("b.ckpt")


def test_memory_is_not_seen_by_a_worker() -> None:
    background = AsyncSaver()
    with pytest.raises(CheckpointError, match="memory of this process"):
        simple.save(Address("memory://x/a.ckpt"), 1, background)
    background.close()


def test_a_protocol_that_nobody_knows_is_named() -> None:
    for call in (checkpoint.open, lambda path: simple.save(path, 1)):
        with pytest.raises(CheckpointError, match=r"nosuch://a.* cannot be reached.*s3fs"):
            call("nosuch://a/b.ckpt")


def test_the_root_of_a_store_stays_in_it() -> None:
    root = publish.place("memory://")
    assert root / "a" / "b.ckpt" == publish.place("memory://a/b.ckpt/")
    assert root.parent == root == publish.place(root)
    assert (root / "a").parent == root / "a" == (root / "a/b").parent


def test_file_addresses_are_paths(tmp_path: Any) -> None:
    simple.save(f"file://{tmp_path}/a.ckpt", 1)
    assert simple.step_of(tmp_path / "a.ckpt") == 1


def _kills(folder: Address, rounds: int, seed: int) -> None:
    """SIGKILL at random moments: what was told to be safe is there, and the next save cleans up."""
    draw, safe = random.Random(seed), 0
    for _ in range(rounds):
        command = [sys.executable, "-m", "tests.checkpoint.killed", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            safe = max(safe, int(child.stdout.readline()))
            time.sleep(draw.uniform(0, 0.5))
            child.kill()
            rest, errors = child.communicate()
        assert not errors
        safe = max([safe, *map(int, rest.split())])
        found = checkpoint.latest(folder)
        assert found is not None
        assert simple.step_of(found) >= safe
        for path in checkpoint.finished(folder):
            simple.step_of(path)
    simple.save(folder / "last.ckpt", safe + 5)
    assert [name for name in names(folder) if name.startswith("last.ckpt")] == one("last.ckpt")


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_moments(objects: Address, seed: int) -> None:
    _kills(objects, 8, seed)


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
@pytest.mark.parametrize("question", ["info", "cat_file", "size", "find"])
def test_a_checkpoint_that_goes_while_it_is_read_is_an_error_of_ours(
    folder: Address, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store has no locks. Whatever is asked when it has gone, the answer is no raw error of the store."""
    for at in range(1, 40):
        simple.save(folder / "a.ckpt", 1)
        asked, ask = 0, Address.ask

        def goes(self: Address, what: str, *args: Any, ask: Any = ask, at: int = at, **options: Any) -> Any:
            nonlocal asked
            asked += what == question
            if asked == at and what == question:
                publish.delete(folder)
            return ask(self, what, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Address, "ask", goes)
            try:
                simple.step_of(folder / "a.ckpt")
            except CheckpointError as error:
                told = str(error)
            else:
                break
        assert any(word in told for word in ("nothing is there", "missing", "removed")), told
    assert 1 < at < 39
