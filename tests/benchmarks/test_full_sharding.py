"""The script that times full sharding beside its peers, small: two ranks, and what it says of peers that fail."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import dense_step, full_sharding, meter
from benchmarks.peers import fsdp2, sharded_llama
from benchmarks.peers.fsdp2 import Runner
from benchmarks.step import Step
from tests.strategies.test_launch import processes, torchrun
from tests.support.workers import run

SHAPE = "layers=2 hidden=32 ffn=64 heads=2 seq=16 vocab=64 steps=1 warmup=1"
HOST = "fully-shard sharding=optimizer_offload_fraction:1.0"


def _timed(path: str) -> int:
    return full_sharding.main([path, "--small", "--but", SHAPE, "--ways", "fully-shard", HOST, "fsdp2", "mfsdp"])


@pytest.mark.full
def test_two_ranks(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert run(_timed, 2, str(path)) == [0, 0]
    result = json.loads(path.read_text())
    ours, host, theirs, refused = result["rows"]
    assert ours["checks"]["twin_losses_float32"] == theirs["checks"]["twin_losses_float32"]
    assert ours["checks"]["twin_losses"][-1] < 0.99 * ours["checks"]["twin_losses"][0]  # it learns, so scale matters
    assert refused == {"peer": "mfsdp", "refused": "this runner is of GPUs and bf16", "held_gib": 0.0}
    assert host["checks"]["twin_losses"] == ours["checks"]["twin_losses"]
    pairs = [("fully-shard", HOST), ("fully-shard", "fsdp2"), (HOST, "fully-shard"), (HOST, "fsdp2")]
    assert list(result["ratios"]) == [f"{a} / {b}" for a, b in pairs]
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


@pytest.mark.full
def test_experts_on_two_ranks(tmp_path: Path) -> None:
    """The row of Megalight with the Trainer, which needs the variables of torchrun."""
    path, ways = tmp_path / "result.json", ["megalight", "megalight ep=2", "fsdp2"]
    words = [str(path), "--small", "--shape", "qwen3-moe", "--but", SHAPE, "--ways", *ways]
    (code,), text = processes([*torchrun(2), str(Path(full_sharding.__file__)), *words])
    assert code == 0, text
    result = json.loads(path.read_text())
    replicas, divided, refused = result["rows"]
    assert replicas["checks"]["twin_difference"] < 1e-5
    assert divided["checks"]["twin_difference"] < 1e-5
    assert refused["refused"] == "this runner has no experts"
    assert result["shape"]["level"] == "optim_grads_params"


def test_an_unknown_peer_is_refused_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        full_sharding.main([str(tmp_path / "result.json"), "--small", "--ways", "megalite level=optim"])
    assert "megalite" in capsys.readouterr().err


def test_what_failed_is_told_and_its_memory_is_free_for_the_next() -> None:
    """A runner that runs out of memory holds tensors in its frames; they are gone when the next way begins."""
    held: list[weakref.ref[torch.Tensor]] = []

    class Greedy:
        def why_not(self, step: Step) -> None:
            tensor = torch.ones(3)
            held.append(weakref.ref(tensor))
            raise torch.OutOfMemoryError("CUDA out of memory")

    with mock.patch.object(dense_step, "load", return_value=Greedy()):
        row = full_sharding.row_of("megalight level=optim", Step(device="cpu"), unchecked=True)
    assert row == {"peer": "megalight level=optim", "failed": "OutOfMemoryError: CUDA out of memory"}
    assert held[0]() is None


def test_what_a_package_still_holds_is_freed() -> None:
    step = Step(device="cpu")
    mine, held = torch.ones(5), list[torch.Tensor]()
    with meter.leaving_nothing(step):
        held += [torch.ones(1000), torch.nn.Parameter(torch.ones(7)), mine[1:]]
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [0, 0, 20]
    assert mine.sum() == 5
