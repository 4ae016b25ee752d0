"""The recipe of hybrids: two processes share every layer, and one process writes with the model."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.recipes.test_layouts import RECIPES, SHORT, _data
from tests.recipes.test_lora import megalight

__all__ = ["_data"]  # the corpus, made before each test

WORDS = [
    *(word for word in SHORT if not word.startswith(("--trainer.callbacks", "--trainer.max_steps"))),
    "--model.config.hidden_size=32",
    "--model.config.ffn_hidden_size=48",
    "--model.config.num_layers=4",
    "--model.config.layer_pattern=M*-M",
    "--model.config.mamba.num_heads=4",
    "--model.config.mamba.state_size=8",
]


@pytest.mark.full
def test_the_recipe_of_hybrids(tmp_path: Path) -> None:
    megalight(tmp_path, "fit", "-c", str(RECIPES / "mamba.yaml"), *WORDS, "--trainer.max_steps=3")
    (found,) = (tmp_path / "runs" / "mamba").rglob("metrics.csv")
    rows = [row for row in csv.DictReader(found.read_text().splitlines()) if row.get("train_loss")]
    losses = [float(row["train_loss"]) for row in rows]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    last = "runs/mamba/checkpoints/last.ckpt"
    said = megalight(tmp_path, "generate", last, "--prompt", "to be", "--max-new-tokens", "4")
    assert "to be" in said
