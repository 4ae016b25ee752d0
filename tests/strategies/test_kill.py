"""Processes that are killed while they save, and ranks that fail: nothing is lost, and nobody is left hanging."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import re
import signal
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalight import checkpoint
from tests.strategies.test_launch import STARTED
from tests.strategies.test_resume import STEPS, ranks
from tests.support.interpreters import environment
from tests.support.workers import meeting

LAYOUT = {"tensor_parallel": 2, "sequence_parallel": True}
RANKS = 2
PEER_SECONDS = 240
"""Until a rank must have noticed its peer's death and ended: far below the 1,800 that a collective waits for it."""


def _doomed(rank: int, place: str, folder: str) -> None:
    """Train like :mod:`tests.strategies.test_resume` does, saving after every step."""
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ.update(WORLD_SIZE=str(RANKS), RANK=str(rank), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", place, rank=rank, world_size=RANKS)
    from tests.strategies.test_resume import _rank

    _rank(folder, LAYOUT, STEPS, None, "gqa", "64-true")


def start(folder: Path) -> list[Any]:
    """Two ranks, forked: this process has loaded everything already."""
    place = meeting()
    context = mp.get_context("fork")
    processes = [context.Process(target=_doomed, args=(rank, place, str(folder)), daemon=True) for rank in range(RANKS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        for process in processes:
            process.start()
    return processes


def kill_during_a_save(folder: Path, processes: list[Any], victims: list[int], draw: random.Random) -> None:
    """SIGKILL at a random moment after the saves of a random step have begun: there are two, which take most of it."""
    begun, deadline = f"step={draw.randrange(1, STEPS - 1)}.ckpt", time.monotonic() + 240
    while not folder.is_dir() or not any(name.startswith(begun) for name in os.listdir(folder)):
        assert time.monotonic() < deadline
        assert all(process.is_alive() for process in processes)
        time.sleep(0.0005)
    time.sleep(draw.random() * 0.06)
    for rank in victims:
        os.kill(processes[rank].pid, signal.SIGKILL)
    for process in processes:
        process.join(PEER_SECONDS)
    assert not any(process.is_alive() for process in processes), "a rank outlived its peer"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run that nobody disturbs."""
    return ranks(LAYOUT, 1, str(tmp_path_factory.mktemp("whole")), LAYOUT, STEPS, None, "gqa", "64-true")[0]


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step="))


VICTIMS = ([0, 1], [1], [0])
CASES = [pytest.param(seed, marks=pytest.mark.full) for seed in range(20)]


@pytest.mark.parametrize("seed", CASES)
def test_a_run_killed_in_a_save_resumes(tmp_path: Path, whole: list[float], seed: int) -> None:
    draw = random.Random(seed)
    kill_during_a_save(tmp_path, processes := start(tmp_path), VICTIMS[seed % 3], draw)
    for process in processes:
        process.close()
    done = checkpoint.finished(tmp_path)
    newest = max((path for path in done if path.name.startswith("step=")), key=step_of, default=None)
    if newest is not None:  # killed in the very first save otherwise
        again = ranks(LAYOUT, 1, str(tmp_path / "other"), LAYOUT, STEPS, str(newest), "gqa", "64-true")[0]
        assert again == whole[step_of(newest) :]
    last = tmp_path / "last.ckpt"
    # "last" is the newest finished checkpoint; Lightning looks for none where last.ckpt is missing.
    at = max(checkpoint.open(path).common["global_step"] for path in done) if last in done else 0
    losses = ranks(LAYOUT, 1, str(tmp_path), LAYOUT, STEPS, "last", "gqa", "64-true")[0]
    assert losses == whole[at:]
    names = {path.name for path in tmp_path.iterdir()}
    assert not {name for name in names if re.search(r"\.(partial|old|removed)-", name)}
    assert all(checkpoint.is_complete(tmp_path / name) for name in names - {"other"})


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_ends_the_run_and_says_why(tmp_path: Path, rank: int) -> None:
    file = tmp_path / "raised"
    command = [
        "megalight",
        "fit",
        "--model=tests.cli.samples.SampleModule",
        "--model.config={}",
        "--data=tests.cli.samples.SampleData",
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.strategy=MegatronStrategy",
        f"--trainer.default_root_dir={tmp_path}",
        "--trainer.callbacks=tests.strategies.launched.Fails",
        f"--trainer.callbacks.rank={rank}",
        f"--trainer.callbacks.file={file}",
    ]
    clean = {name: value for name, value in environment().items() if name not in STARTED}
    process = subprocess.Popen(command, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    text = process.communicate(timeout=200)[0]  # ends when nobody holds the pipe any more: all ranks are gone
    seconds = time.time() - float(file.read_text())
    assert process.returncode != 0
    assert f"ArithmeticError: rank {rank} has had enough" in text
    assert "on_train_batch_start" in text  # its traceback
    assert seconds < 180  # far below the 1,800 that a collective waits for a dead peer
