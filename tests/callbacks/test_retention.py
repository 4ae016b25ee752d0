"""Which checkpoints are kept, by every rule, over runs; never one that is read, damaged or linked to."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight import checkpoint
from megalight.callbacks import Retention
from megalight.callbacks.retention import ENTRY
from megalight.checkpoint.disk import manifest, publish
from megalight.errors import ConfigurationError
from megalight.strategies import MegatronStrategy
from tests.callbacks.test_transformers_export import pl_trainer
from tests.checkpoint import simple
from tests.strategies.test_weights import OPTIONS
from tests.strategies.training import ADAM, BASE, WithData
from tests.support.objects import BUCKET, server  # noqa: F401 (a fixture)

METRICS = {1: 5.0, 2: 3.0, 3: 4.0, 4: float("nan"), 5: None, 6: 6.0, 7: 2.0, 8: 9.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step, metric in METRICS.items():
        common = {"global_step": step, ENTRY: {"monitor": "loss", "metric": metric}}
        checkpoint.save(tmp_path / f"step={step}.ckpt", {}, common=common)
    return tmp_path


RULES: list[tuple[dict[str, Any], set[int]]] = [
    ({}, {8}),
    ({"last": 3}, {6, 7, 8}),
    ({"best": 2, "monitor": "loss"}, {2, 7, 8}),
    ({"best": 2, "monitor": "loss", "mode": "max"}, {6, 8}),
    ({"best": 2, "monitor": "another"}, {8}),
    ({"every_n_steps": 3}, {3, 6, 8}),
    ({"milestones": [1, 4, 99], "every_n_steps": 6}, {1, 4, 6, 8}),
]


@pytest.mark.parametrize(("rules", "kept"), RULES, ids=str)
def test_every_rule(rules: dict[str, Any], kept: set[int], folder: Path) -> None:
    assert {each.step for each in Retention(**rules).removable(folder)} == METRICS.keys() - kept


def test_last_links_and_damage_are_left_alone(folder: Path) -> None:
    checkpoint.save(folder / "last.ckpt", {}, common={"global_step": 8})
    (folder / "newest.ckpt").symlink_to("step=2.ckpt")
    common = folder / "step=3.ckpt" / "common.json"
    common.write_bytes(common.read_bytes().replace(b"3", b"4"))
    assert {each.step for each in Retention().removable(folder)} == {1, 4, 5, 6, 7}


READER = """
import sys
from megalight import checkpoint
opened = checkpoint.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def test_a_checkpoint_that_another_run_removes_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are applied on one rank, which must not stop alone. The other run is at any point of its removal."""
    real, asked = manifest.read, 0

    def removes_first(root: Path) -> manifest.Manifest:
        nonlocal asked
        asked += 1
        if asked == at:
            checkpoint.remove(root)
            raise FileNotFoundError(2, "No such file or directory", str(root))
        return real(root)

    monkeypatch.setattr(manifest, "read", removes_first)
    for at in (1, len(METRICS) + 2):  # while all are listed, and while they are opened
        asked = 0
        assert Retention(last=1).removable(folder)
        assert asked > at


def test_a_checkpoint_that_is_read_is_not_removed(folder: Path) -> None:
    path = folder / "step=1.ckpt"
    words = [sys.executable, "-c", READER, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        assert not checkpoint.remove(path)
        assert checkpoint.is_complete(path)
        reader.kill()
    assert checkpoint.remove(path)  # a reader that was killed holds nothing
    assert not path.exists()
    opened = checkpoint.open(folder / "step=2.ckpt")
    assert not checkpoint.remove(folder / "step=2.ckpt")
    opened.release()
    assert checkpoint.remove(folder / "step=2.ckpt")


SAVER = """
import sys
from itertools import count
import torch
from megalight import checkpoint
from megalight.callbacks import Retention
from megalight.checkpoint.disk.publish import place
from tests.checkpoint import simple
torch.set_num_threads(1)
folder = place(sys.argv[1])
newest = checkpoint.latest(folder)
for step in count(simple.step_of(newest) + 1 if newest else 1):
    simple.save(folder / f"step={step}.ckpt", step)
    for each in Retention(last=2).removable(folder):
        checkpoint.remove(each.path)
    print(step, flush=True)
"""
READERS = """
import os
import sys
import torch
from megalight import checkpoint
from megalight.checkpoint.disk.publish import place
from megalight.errors import CheckpointError
from tests.checkpoint import simple
torch.set_num_threads(1)
os.nice(5)  # they never rest, and on a busy machine the saver would hardly begin
folder = place(sys.argv[1])
while True:
    for path in checkpoint.finished(folder):
        try:
            assert simple.step_of(path) == int(path.name[5:-5])
        except CheckpointError as error:
            # What is removed between the listing and the lock is missing. Without locks it may go while it is read.
            assert any(word in str(error) for word in ("nothing is there", "missing", "removed")), error
        print("read", flush=True)
"""


LIMIT_SECONDS = 240
"""To begin, which means importing torch, and to save or read once."""


def drain(pipe: Iterable[str], into: list[str]) -> None:
    for line in pipe:
        into.append(line)


class Child:
    """A process whose output is read while it runs, so that it never waits for a full pipe."""

    def __init__(self, code: str, folder: str) -> None:
        words = [sys.executable, "-c", code, folder]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=drain, args=(pipe or (), into), daemon=True)
            for into, pipe in ((self.lines, self.process.stdout), (self.errors, self.process.stderr))
        ]
        for thread in self._threads:
            thread.start()

    def until(self, lines: int) -> None:
        """Wait until it has written so many lines. What it said of errors is shown if it ends, or takes too long."""
        end = time.monotonic() + LIMIT_SECONDS
        while len(self.lines) < lines:
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < end, f"{len(self.lines)} of {lines} lines in {LIMIT_SECONDS} s; {self.end()}"
            time.sleep(0.005)

    def end(self) -> str:
        """Kill it. Returns what it wrote of errors."""
        self.process.kill()
        self.process.wait()
        for thread, pipe in zip(self._threads, (self.process.stdout, self.process.stderr), strict=True):
            thread.join()
            assert pipe is not None
            pipe.close()
        return "".join(self.errors)


def churn(folder: str, rounds: int, seed: int) -> None:
    """Two readers go on while a process that saves and removes is killed again and again."""
    draw, safe = random.Random(seed), 0
    readers = [Child(READERS, folder) for _ in range(2)]
    try:
        for _ in range(rounds):
            saver = Child(SAVER, folder)
            try:
                saver.until(1)
                time.sleep(draw.uniform(0, 0.5))
            finally:
                errors = saver.end()
            assert not errors, errors
            safe = max([safe, *map(int, saver.lines)])
            newest = checkpoint.latest(folder)
            assert newest is not None
            assert simple.step_of(newest) >= safe
        for reader in readers:
            reader.until(len(reader.lines) + 1)
    finally:
        ended = [reader.end() for reader in readers]
    assert ended == ["", ""], "\n".join(ended)
    # Nobody reads any more: what was kept for a reader goes.
    for each in Retention(last=2).removable(publish.place(folder)):
        assert checkpoint.remove(each.path)
    assert len(checkpoint.finished(folder)) == 2


@pytest.mark.timeout(1200)
@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
def test_readers_and_kills_beside_removals(seed: int, tmp_path: Path) -> None:
    """20 kills."""
    churn(str(tmp_path), 4, seed)


@pytest.mark.timeout(1200)
@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_readers_and_kills_beside_removals_in_a_store(seed: int, server: str) -> None:  # noqa: F811
    """9 kills. A store has no locks: a checkpoint may go while it is read."""
    churn(f"s3://{BUCKET}/{uuid4().hex}", 3, seed)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists", "ignore:You.re resuming from a checkpoint")
def test_a_run_keeps_the_last_two_and_multiples_also_after_a_resume(tmp_path: Path) -> None:
    def fit(steps: int, resume: str | None) -> set[str]:
        save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [save, Retention(last=2, every_n_steps=3)]
        options = {**OPTIONS, "enable_checkpointing": True}
        module = WithData(BASE, optimizer=ADAM)
        module.steps = 8
        pl_trainer(MegatronStrategy(), callbacks=callbacks, max_steps=steps, **options).fit(module, ckpt_path=resume)
        return {path.name for path in tmp_path.iterdir()}

    assert fit(5, None) == {"step=3.ckpt", "step=4.ckpt", "step=5.ckpt"}
    assert fit(8, str(tmp_path / "step=5.ckpt")) == {"step=3.ckpt", "step=6.ckpt", "step=7.ckpt", "step=8.ckpt"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"last": 0}, "last must be at least 1"),
        ({"best": 2}, "name the metric"),
        ({"every_n_steps": 0}, "every_n_steps is 0"),
        ({"mode": "least"}, "mode is 'least'"),
    ],
)
def test_rules_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Retention(**arguments)
