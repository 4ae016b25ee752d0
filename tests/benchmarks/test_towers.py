"""The benchmark of a vision tower's place: rows of two processes, and their count of operations."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import towers
from benchmarks.peers.megalight import Wrong
from megalight.models.vlm.module import Trained
from tests.support.interpreters import environment

ROOT = Path(__file__).parents[2]


def test_a_trained_tower_is_counted() -> None:
    shape = towers.shape_of("llava-1.5", "cuda")
    assert shape.config.language.num_layers == 8
    tower = 577 * (6 * (23 * 12 * 1024**2 + 588 * 1024) + 12 * 23 * 1024 * 577)
    projector = 577 * 6 * (1024 * 4096 + 4096**2)
    assert shape.image_flops(Trained()) == pytest.approx(32 * (tower + projector), rel=2e-3)
    assert shape.flops(Trained()) == shape.text_flops(Trained()) + shape.image_flops(Trained())
    for name in towers.SHAPES:  # so that each way can divide it
        assert towers.shape_of(name, "cuda").rows == towers.ROWS["cuda"][name]


def test_other_losses_than_those_of_the_first_way_are_not_timed() -> None:
    with mock.patch.object(towers, "train", return_value=[torch.tensor(1.0)]), pytest.raises(Wrong):
        towers.measure("llava-1.5", "disjoint", "cpu", [1.1])


@pytest.mark.full
def test_rows_of_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    launcher = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    words = [str(ROOT / "benchmarks" / "towers.py"), str(path), "--small", "--shapes", "qwen2.5-vl"]
    run = subprocess.run(
        [*launcher, *words, "--ways", "together", "disjoint"],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["row"] for row in rows] == ["qwen2.5-vl, together", "qwen2.5-vl, disjoint"]
    assert rows[1]["difference_of_losses"] < 1e-5 < rows[1]["seconds"]
    assert rows[1]["losses"][-1] < rows[1]["losses"][0]
    assert len(rows[1]["peak_gib"]) == 2
    assert "| qwen2.5-vl, disjoint |" in run.stdout
