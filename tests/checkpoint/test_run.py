"""What ranks read of their own when a run resumes: all of them or none, and no more files than they need."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalight import checkpoint
from megalight.checkpoint.run import MAGNITUDES, TrainingRun
from megalight.errors import CheckpointError
from tests.support.workers import run


class Streams:
    """Random streams that note what they are given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def load_state_dict(self, state: Any) -> None:
        self.given.append(state)


class History:
    """A history of delayed scaling that notes what it is given."""

    def __init__(self) -> None:
        self.past: Tensor | None = None

    def restore(self, past: Tensor) -> None:
        self.past = past


class Part(TrainingRun):
    """The part of one rank of a run with the given histories."""

    def __init__(self, rank: int, **histories: History) -> None:
        model: Any = SimpleNamespace(mesh=SimpleNamespace(global_rank=rank))
        streams: Any = Streams()
        super().__init__(model, streams)
        object.__setattr__(self, "held", histories)

    def _histories(self) -> Any:
        return self.held  # type: ignore[attr-defined]


def flip(file: Path) -> None:
    """Damage a file without a change of its size."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _resume_from_a_damaged_file(path: Path) -> tuple[str, list[Any]]:
    rank = dist.get_rank()
    checkpoint.save(path, {}, rank_state={"random": rank})
    if rank == 1:
        flip(path / "ranks" / "1.json")
    dist.barrier()
    part = Part(rank)
    with pytest.raises(CheckpointError) as told:
        part.resume_rank(checkpoint.open(path))
    return str(told.value), part.streams.given  # type: ignore[attr-defined]


def test_a_damaged_file_of_one_rank_is_told_to_all(tmp_path: Path) -> None:
    for message, given in run(_resume_from_a_damaged_file, 2, tmp_path / "a.ckpt"):
        assert "failed on rank 1" in message
        assert "ranks/1.json" in message
        assert given == []


@pytest.mark.parametrize("kept", [False, True])
def test_files_of_other_ranks_are_read_for_histories_alone(tmp_path: Path, kept: bool) -> None:
    path = tmp_path / "a.ckpt"
    past = {"names": ["w"], "past": torch.ones(1, 2, 3)} if kept else {"names": [], "past": ()}
    states = {rank: {"random": rank, MAGNITUDES: past if rank == 1 else {"names": [], "past": ()}} for rank in (1, 2)}
    common = {"optimizer": {MAGNITUDES: kept}}
    checkpoint.save(path, {}, common=common, rank_state={"random": 0}, other_ranks=states)
    flip(path / "ranks" / "2.json")  # never needed: rank 1 has the history, or nobody has
    history = History()
    part = Part(0, w=history)
    part.resume_rank(checkpoint.open(path))
    assert part.streams.given == [0]  # type: ignore[attr-defined]
    assert (history.past is not None) == kept
    missing = Part(0, w=History(), v=History())
    if kept:
        with pytest.raises(CheckpointError, match=r"ranks/2\.json"):
            missing.resume_rank(checkpoint.open(path))
        assert missing.streams.given == []  # type: ignore[attr-defined]
    else:
        missing.resume_rank(checkpoint.open(path))


@pytest.mark.parametrize("name", ["model", "optimizer", "optimizer.exp_avg", ""])
def test_states_beside_the_optimizer_cannot_take_its_name_or_that_of_weights(name: str) -> None:
    model: Any = SimpleNamespace()
    streams: Any = Streams()
    TrainingRun(model, streams, extra={"models": [], "ema.fast": []})
    with pytest.raises(CheckpointError, match=f"has the name '{name}', and checkpoints keep model and optimizer"):
        TrainingRun(model, streams, extra={name: []})
