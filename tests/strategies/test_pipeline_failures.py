"""A rank that raises, or is killed, in the midst of a schedule ends the run on all ranks; the culprit speaks first."""

from __future__ import annotations

import re
import sys
import time
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.strategies.test_launch import processes, torchrun
from tests.support.cover import pairwise

SCRIPT = "tests.strategies.failing"
LIMIT = 240
"""Seconds: far below the 1,800 that a collective waits for a dead peer. A free machine needs three to eight."""

SOME = [("popen", "backward", 4, 2), ("torchrun", "loss", 2, 1)]
"""Both starts, both directions, a rank with others on either side and the last one."""
EVERY = [
    (how, where, pp, rank)
    for how, where, pp in product(("popen", "torchrun"), ("forward", "backward", "loss"), (2, 4))
    for rank in ((pp - 1,) if where == "loss" else (0, pp - 1) if pp == 2 else (0, 1, 2, pp - 1))
]
ROWS = [pytest.param(*row, marks=[pytest.mark.full] * (row not in SOME)) for row in pairwise(EVERY, SOME)]


def end_of(how: str, where: str, pp: int, rank: int, folder: Path, *more: str) -> tuple[str, float]:
    """What the run said, and how many seconds after the failure all of its processes were gone."""
    words = ["-m", SCRIPT, str(folder / "failed"), where, str(pp), str(rank), *more]
    python = sys.executable if where == "orphans" else "python"  # they look for the process that has started them
    (code,), text = processes([*torchrun(pp), *words] if how == "torchrun" else [python, *words])
    assert code != 0, text
    return text, time.time() - float((folder / "failed").read_text())


@pytest.mark.parametrize(("how", "where", "pp", "rank"), ROWS)
def test_a_rank_that_raises_ends_the_run(tmp_path: Path, how: str, where: str, pp: int, rank: int) -> None:
    text, seconds = end_of(how, where, pp, rank, tmp_path)
    assert seconds < LIMIT
    first = text.index("Traceback")
    error = re.search(rf"ArithmeticError: pipeline rank {rank} has had enough\n(.*)", text)
    assert error is not None, text
    assert "Error: " not in text[first : error.start()], "another rank's error comes first"
    kind = "backward" if where == "backward" else "forward"
    where = rf"pipeline: {kind} of micro-batch 3 on stage {rank} \(.*layers? .*\) of {pp}, pipeline rank {rank}"
    assert re.search(where, error[1]), error[1]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_rank_that_raises_waits_for_nobody(tmp_path: Path, rank: int) -> None:
    """On a GPU a receive that was posted ahead never ends, and whoever waits for the device does not either."""
    text, seconds = end_of("popen", "stuck", 2, rank, tmp_path)
    assert seconds < LIMIT
    assert f"ArithmeticError: pipeline rank {rank} has had enough" in text


@pytest.mark.parametrize(
    ("how", "pp", "rank"),
    [
        ("popen", 2, 1),
        *[
            pytest.param(how, pp, rank, marks=pytest.mark.full)
            for how, pp, rank in [("torchrun", 2, 0), ("popen", 4, 0), ("popen", 4, 2), ("torchrun", 4, 3)]
        ],
    ],
)
def test_a_rank_that_is_killed_ends_the_run(tmp_path: Path, how: str, pp: int, rank: int) -> None:
    text, seconds = end_of(how, "kill", pp, rank, tmp_path)
    assert seconds < LIMIT
    if how == "popen" and rank:
        lightnings = f"[rank: {rank}] Child process"  # its own watch is the first where the machine is busy
        assert f"rank {rank} was killed by SIGKILL" in text or lightnings in text


@pytest.mark.full
def test_ranks_end_after_rank_0_was_killed(tmp_path: Path) -> None:
    """On GPUs no connection breaks: a collective without rank 0 never ends. (Cheaper: test_orphans.)"""
    text, seconds = end_of("popen", "orphans", 2, 0, tmp_path)
    assert seconds < LIMIT
    assert "which it started, ends too" in text


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("how", "where", "rank"),
    [("popen", "forward", 0), ("popen", "kill", 0), ("popen", "kill", -1), ("torchrun", "backward", -1)],
)
def test_failures_on_gpus(tmp_path: Path, how: str, where: str, rank: int) -> None:
    """NCCL's receives that were posted ahead never end. (torchrun gives the others 30 seconds.)"""
    pp = min(4, torch.cuda.device_count())
    rank %= pp
    text, seconds = end_of(how, where, pp, rank, tmp_path, "--accelerator", "gpu")
    assert seconds < LIMIT
    assert where == "kill" or f"ArithmeticError: pipeline rank {rank} has had enough" in text
