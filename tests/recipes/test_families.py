"""Recipes of small models of published families: two processes train each, and the weights leave again."""

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
]


@pytest.mark.parametrize(
    ("recipe", "model_type", "words"),
    [
        pytest.param(
            "gemma", "gemma2", ["--model.config.embedding_multiplier=5.656854249492381"], marks=pytest.mark.full
        ),
        pytest.param("qwen3", "qwen3", [], marks=pytest.mark.full),
        pytest.param("mamba2", "mamba2", ["--model.config.ffn_hidden_size=128"], marks=pytest.mark.full),  # unused
        pytest.param(
            "llama4",
            "llama4_text",
            ["--model.config.moe.ffn_hidden_size=16", "--model.config.moe.shared.ffn_hidden_size=16"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "gemma3",
            "gemma3_text",
            ["--model.config.embedding_multiplier=5.656854249492381"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "qwen3-next",
            "qwen3_next",
            ["--model.config.moe.ffn_hidden_size=16", "--model.config.moe.shared.ffn_hidden_size=16"],
            marks=pytest.mark.full,
        ),
        pytest.param("gpt-oss", "gpt_oss", [], marks=pytest.mark.full),
        pytest.param("olmoe", "olmoe", [], marks=pytest.mark.full),
        pytest.param(
            "deepseek-v2",
            "deepseek_v2",
            ["--model.config.moe.ffn_hidden_size=16", "--model.config.moe.shared.ffn_hidden_size=32"],
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_recipe_of_a_family(tmp_path: Path, recipe: str, model_type: str, words: list[str]) -> None:
    megalight(tmp_path, "fit", "-c", str(RECIPES / f"{recipe}.yaml"), *WORDS, *words, "--trainer.max_steps=3")
    (found,) = (tmp_path / "runs" / recipe).rglob("metrics.csv")
    rows = [row for row in csv.DictReader(found.read_text().splitlines()) if row.get("train_loss")]
    losses = [float(row["train_loss"]) for row in rows]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    megalight(tmp_path, "convert", f"runs/{recipe}/checkpoints/last.ckpt", "folder", "--quiet")
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["model_type"] == model_type
