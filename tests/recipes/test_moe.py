"""The recipe of experts: two processes train it, one goes on with the checkpoint and generates."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.recipes.test_layouts import RECIPES, SHORT, _data, megalight

__all__ = ["_data"]  # the corpus, made before each test

WORDS = [
    *(word for word in SHORT if not word.startswith(("--trainer.callbacks", "--trainer.max_steps"))),
    "--model.config.hidden_size=32",
    "--model.config.ffn_hidden_size=48",
    "--model.config.moe.ffn_hidden_size=32",
]
ONE = ["--trainer.devices=1", "--trainer.strategy.expert_parallel=1"]


@pytest.mark.full
def test_the_recipe_of_experts(tmp_path: Path) -> None:
    recipe = str(RECIPES / "moe.yaml")
    megalight(tmp_path, "fit", "-c", recipe, *WORDS, "--trainer.max_steps=3")
    megalight(tmp_path, "fit", "-c", recipe, *WORDS, "--trainer.max_steps=5", *ONE, "--ckpt_path=last")
    found = sorted((tmp_path / "runs" / "moe").rglob("metrics.csv"))
    rows = [row for file in found for row in csv.DictReader(file.read_text().splitlines()) if row.get("train_loss")]
    assert len(found) == 2
    assert len(rows) == 3 + 2
    balance = [float(row["train_router_aux_loss"]) for row in rows]
    assert all(1 <= float(row["experts_3/max_load"]) <= 8 > float(row["experts_3/min_load"]) >= 0 for row in rows)
    assert all(float(row["experts_1/drop_rate"]) == 0 for row in rows)
    # two layers with the coefficient 0.01, and a router that is nearly balanced
    assert balance == pytest.approx([0.02] * 5, rel=0.2)
    last = "runs/moe/checkpoints/last.ckpt"
    said = megalight(tmp_path, "generate", last, "--prompt", "to be", "--max-new-tokens", "4")
    assert "to be" in said
