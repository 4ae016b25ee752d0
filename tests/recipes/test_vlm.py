"""The recipe of a vision-language model: it learns to name pictures, and goes on in its own and in another layout."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.programs import run_program
from tests.support.source import ROOT

EXAMPLES, RECIPE = ROOT / "examples", ROOT / "recipes" / "vlm.yaml"
PICTURES, DATA, CHECKPOINTS = "runs/vlm/pictures", "runs/vlm/data", "runs/vlm/checkpoints"
STOP, STEPS = 1200, 1600
LAYOUTS = {
    "the same": [],
    "two processes": [
        "--trainer.devices=2",
        "--trainer.strategy.tensor_parallel=2",
        "--trainer.strategy.sequence_parallel=true",
    ],
}
MINUTES = 60
"""For one command. On a machine with nothing beside it, all of them take less than ten."""


def _run(folder: Path, program: str, *words: str) -> str:
    return run_program(program, *words, folder=folder, seconds=60 * MINUTES)


def _learned(folder: Path) -> float:
    """Return the share of right answers about 1,000 pictures that the model has not seen."""
    said = _run(folder, f"{EXAMPLES / 'picture_answers.py'}", CHECKPOINTS, PICTURES, "--at-least", "0.95")
    print(said)
    found = re.search(r"(\d+) of 1000 right", said)
    assert found is not None
    return int(found[1]) / 1000


@pytest.mark.full
@pytest.mark.timeout(60 * MINUTES)
def test_the_recipe_learns_and_goes_on_in_both_layouts(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    _run(tmp_path, f"{EXAMPLES / 'pictures.py'}", PICTURES)
    for part in ("train", "held_out"):
        words = ["--multimodal", f"{PICTURES}/{part}.json", "--output", f"{DATA}/{part}", "--quiet"]
        _run(tmp_path, "megalight", "prepare", *words, "--tokenizer", f"{PICTURES}/tokenizer")
    fit = ["megalight", "fit", "--config", str(RECIPE)]
    stopped = [f"--trainer.max_steps={STOP}", f"--model.optimizer.schedule.steps={STEPS}"]
    _run(tmp_path, *fit, *stopped)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / CHECKPOINTS, kept)
    for name, layout in LAYOUTS.items():
        shutil.rmtree(tmp_path / CHECKPOINTS)
        shutil.copytree(kept, tmp_path / CHECKPOINTS)
        said = _run(tmp_path, *fit, "--ckpt_path=last", *layout)
        assert f"step={STEPS}" in {path.name.split("-")[-1].removesuffix(".ckpt") for path in _saved(tmp_path)}, said
        assert _learned(tmp_path) >= 0.95, name
    _run(tmp_path, "megalight", "plot", "runs/vlm/lightning_logs", "--metric", "train_loss", "--output", "vlm.svg")
    assert "<svg" in (tmp_path / "vlm.svg").read_text(encoding="utf-8")


def _saved(folder: Path) -> list[Path]:
    return list((folder / CHECKPOINTS).glob("*.ckpt"))
