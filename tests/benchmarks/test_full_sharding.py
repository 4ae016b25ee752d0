"""The script that times full sharding beside its peers, small: two ranks, and what it says of peers that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import full_sharding
from benchmarks.peers import fsdp2, sharded_llama
from benchmarks.peers.fsdp2 import Runner
from tests.workers import run

SHAPE = "layers=2 hidden=32 ffn=64 heads=2 seq=16 vocab=64 steps=1 warmup=1"


def _timed(path: str) -> int:
    return full_sharding.main([path, "--small", "--but", SHAPE, "--ways", "fully-shard", "fsdp2", "mfsdp"])


@pytest.mark.full
def test_two_ranks(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert run(_timed, 2, str(path)) == [0, 0]
    result = json.loads(path.read_text())
    ours, theirs, refused = result["rows"]
    assert ours["checks"]["twin_losses_float32"] == theirs["checks"]["twin_losses_float32"]
    assert ours["checks"]["twin_losses"][-1] < 0.99 * ours["checks"]["twin_losses"][0]  # it learns, so scale matters
    assert refused == {"peer": "mfsdp", "refused": "this runner is of GPUs and bf16"}
    assert list(result["ratios"]) == ["fully-shard / fsdp2"]
    ratio = result["ratios"]["fully-shard / fsdp2"]
    assert ratio["tflops"] == pytest.approx(theirs["seconds"] / ours["seconds"])


class Unscaled(Runner):
    """Twice the rate of learning: as if gradients were summed over two ranks, and not averaged."""

    def shard(self, *arguments: Any) -> sharded_llama.Sharded:
        sharded = super().shard(*arguments)
        sharded.optimizer.param_groups[0]["lr"] *= 2
        return sharded


def _wrong(path: str) -> int:
    with mock.patch.object(fsdp2, "Runner", Unscaled):
        return full_sharding.main([path, "--small", "--but", SHAPE, "--ways", "fsdp2", "fully-shard"])


@pytest.mark.full
def test_a_peer_whose_losses_are_wrong_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert run(_wrong, 2, str(path)) == [1, 1]
    wrong, right = json.loads(path.read_text())["rows"]
    assert "losses differ from float32" in wrong["failed"]
    assert "tflops" not in wrong
    assert right["checks"]["twin_difference"] < sharded_llama.TOLERANCE["fp32"]
