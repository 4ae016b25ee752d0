"""A rank that fails while others wait for its shards ends the run on all ranks, with its own error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strategies.test_pipeline_failures import LIMIT, end_of


@pytest.mark.parametrize(
    ("how", "where", "rank", "error"),
    [
        ("popen", "memory", 1, "OutOfMemoryError: rank 1 has no memory left"),
        pytest.param("torchrun", "forward", 0, "ArithmeticError: pipeline rank 0", marks=pytest.mark.full),
        pytest.param("popen", "backward", 0, "ArithmeticError: pipeline rank 0", marks=pytest.mark.full),
        pytest.param("torchrun", "memory", 1, "OutOfMemoryError: rank 1 has no memory", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_raises_ends_the_run(tmp_path: Path, how: str, where: str, rank: int, error: str) -> None:
    text, seconds = end_of(how, where, 2, rank, tmp_path, "--sharded")
    assert seconds < LIMIT
    first = text.index("Traceback")
    assert error in text
    assert "Error: " not in text[first : text.index(error)].replace("OutOfMemoryError: ", ""), (
        "another error came first"
    )


@pytest.mark.full
@pytest.mark.parametrize(("where", "rank"), [("forward", 1), ("backward", 2), ("memory", 3)])
def test_a_rank_of_a_sharded_pipeline_that_raises_ends_the_run(tmp_path: Path, where: str, rank: int) -> None:
    """Others wait for its shards, and others for messages of these."""
    text, seconds = end_of("popen", where, 4, rank, tmp_path, "--sharded", "--stages=2")
    assert seconds < LIMIT
    assert ("OutOfMemoryError: rank 3" if where == "memory" else f"ArithmeticError: pipeline rank {rank}") in text


def test_a_rank_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    text, seconds = end_of("popen", "kill", 2, 1, tmp_path, "--sharded")
    assert seconds < LIMIT
    assert "rank 1 was killed by SIGKILL" in text or "[rank: 1] Child process" in text
