"""A run that is told to stop, and killed before its last save is complete, goes on from the save before."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight import checkpoint
from megalight.callbacks import Preemption
from megalight.checkpoint.inspection import diff, verify
from megalight.strategies import CheckpointOptions, MegatronStrategy
from tests.checkpoint.async_workers import workers_of
from tests.strategies.training import ADAM, BASE, SEED, WithData
from tests.support.environment import trainer
from tests.support.workers import run

STEPS = 8


class Told(pl.Callback):
    """The cluster tells this process to stop."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def _fit(folder: str, resume: str | None, kind: Any = None, told: int = STEPS) -> None:
    module = WithData(BASE, optimizer=ADAM, seed=SEED)
    module.steps = STEPS
    every = {"every_n_train_steps": 1, "save_top_k": -1}
    runner = trainer(
        MegatronStrategy(checkpoints=CheckpointOptions(async_save=kind)),
        callbacks=[Preemption(every_n_steps=1), Told(told), ModelCheckpoint(folder, "{step}", **every)],  # type: ignore[arg-type]
        enable_checkpointing=True,
        max_steps=STEPS,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    runner.fit(module, ckpt_path=resume)


def _doomed(folder: str, kind: Any, told: int) -> None:
    """In a process of its own, which says nothing."""
    torch.set_num_threads(1)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    _fit(folder, None, kind, told)


def killed(folder: Path, kind: str | None, draw: random.Random) -> bool:
    """Tell a run to stop, and kill it a moment after its last save has begun. Returns whether that was in time."""
    process = mp.get_context("fork").Process(
        target=_doomed, args=(str(folder), kind, draw.randrange(2, STEPS - 2)), daemon=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        process.start()
    pid, end = process.pid, time.monotonic() + 240
    assert pid is not None
    while process.is_alive() and not any(folder.glob("last-preempted*")):
        assert time.monotonic() < end
        time.sleep(0.0005)
    time.sleep(draw.uniform(0, 0.05))
    process.kill()
    process.join()
    while workers_of(pid):  # they end when they see it
        assert time.monotonic() < end
        time.sleep(0.01)
    in_time = process.exitcode == -signal.SIGKILL
    process.close()
    return in_time


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of the run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    run(_fit, 1, str(folder), None)
    return folder / f"step={STEPS}.ckpt"


CASES = [
    pytest.param(kind, seed, marks=[pytest.mark.full] if seed or kind is None else [])
    for kind in (None, "persistent")
    for seed in range(6)
]


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_grace_period_that_is_too_short(kind: str | None, seed: int, whole: Path, tmp_path: Path) -> None:
    draw, hits = random.Random(f"{kind} {seed}"), 0
    for turn in range(3):
        folder = tmp_path / str(turn)
        folder.mkdir()
        hits += killed(folder, kind, draw)
        newest = checkpoint.latest(folder)
        assert newest is not None, "steps before the signal were saved"
        assert verify(newest) == []
        run(_fit, 1, str(folder), str(newest))
        assert diff(folder / whole.name, whole) == []
        assert all(checkpoint.is_complete(path) for path in folder.iterdir())
    assert hits
