"""The recipe of draft models: a draft learns beside what the demo's recipe has trained, and is exported."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from megalight import checkpoint
from megalight.models.eagle import export_draft
from tests.recipes.test_layouts import RECIPES, _data, megalight
from tests.recipes.test_lora import WORDS

__all__ = ["_data"]  # the corpus, made before each test


@pytest.mark.full
def test_the_recipe_of_draft_models(tmp_path: Path) -> None:
    demo, eagle = (str(RECIPES / f"{name}.yaml") for name in ("demo", "eagle"))
    megalight(tmp_path, "fit", "-c", demo, *WORDS)
    megalight(tmp_path, "fit", "-c", eagle, *WORDS)
    (file,) = (tmp_path / "runs" / "eagle").rglob("metrics.csv")
    with file.open() as lines:
        columns = set(next(csv.reader(lines)))
    assert {"train_loss", "train_step_3_loss", "val_step_0_accuracy"} <= columns
    draft = tmp_path / "runs" / "eagle" / "checkpoints" / "last.ckpt"
    assert checkpoint.open(draft).tensors["model.fuse.weight"].shape == (32, 96)
    base, said = tmp_path / "runs" / "demo" / "checkpoints" / "last.ckpt", ["-n", "24", "-t", "0", "-p", "to be"]
    plain = megalight(tmp_path, "generate", str(base), *said)
    assert megalight(tmp_path, "generate", str(base), "--draft", str(draft), *said) == plain
    questions = ["--questions", str(RECIPES / "eagle-questions.jsonl"), "--plain", "-n", "24"]
    told = megalight(tmp_path, "acceptance", str(base), "--draft", str(draft), *questions)
    assert 1 <= float(told.rpartition("all: acceptance length ")[2].split()[0]) <= 5
    stored = ["hidden-states", "--output", "runs/states", "--processes=2", "-q", "--", "-c", eagle, *WORDS]
    assert "hidden states of 32 features" in megalight(tmp_path, *stored)
    offline = ["--model.base=runs/states", "--trainer.default_root_dir=runs/offline"]
    megalight(tmp_path, "fit", "-c", eagle, *WORDS, *offline)
    (other,) = (tmp_path / "runs" / "offline").rglob("metrics.csv")
    losses = []
    for each in (file, other):
        with each.open() as lines:
            losses.append([float(row["train_loss"]) for row in csv.DictReader(lines) if row.get("train_loss")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    export_draft(draft, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
