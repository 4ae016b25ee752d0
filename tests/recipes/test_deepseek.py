"""The recipe of DeepSeek: two processes train latent attention and experts, and the weights leave for transformers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.recipes.test_layouts import RECIPES, SHORT, _data
from tests.recipes.test_lora import megalight

__all__ = ["_data"]  # the corpus, made before each test

WORDS = [
    *(word for word in SHORT if not word.startswith(("--trainer.callbacks", "--trainer.max_steps"))),
    "--model.config.hidden_size=32",
    "--model.config.ffn_hidden_size=48",
    "--model.config.moe.ffn_hidden_size=16",
    "--model.config.moe.shared.ffn_hidden_size=16",
]


@pytest.mark.full
def test_the_recipe_of_deepseek(tmp_path: Path) -> None:
    megalight(tmp_path, "fit", "-c", str(RECIPES / "deepseek.yaml"), *WORDS, "--trainer.max_steps=3")
    (found,) = (tmp_path / "runs" / "deepseek").rglob("metrics.csv")
    rows = [row for row in csv.DictReader(found.read_text().splitlines()) if row.get("train_loss")]
    losses = [float(row["train_loss"]) for row in rows]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    last = "runs/deepseek/checkpoints/last.ckpt"
    megalight(tmp_path, "convert", last, "folder", "--quiet")
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["model_type"] == "deepseek_v3"
    said = megalight(tmp_path, "generate", last, "--prompt", "to be", "--max-new-tokens", "4")
    assert "to be" in said
