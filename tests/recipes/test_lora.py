"""The recipe of adapters: fine-tunes what the demo's recipe has trained, and is merged."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalight import checkpoint
from tests.recipes.test_layouts import RECIPES, SHORT, SMALL, _data, megalight

__all__ = ["_data"]  # the corpus, made before each test

WORDS = [
    *(word for word in SHORT if not word.startswith("--trainer.callbacks")),
    *SMALL,
    "--trainer.devices=1",
    "--trainer.strategy.tensor_parallel=1",
    "--trainer.strategy.sequence_parallel=false",
]


@pytest.mark.full
def test_the_recipe_of_adapters(tmp_path: Path) -> None:
    demo, lora = (str(RECIPES / f"{name}.yaml") for name in ("demo", "lora"))
    megalight(tmp_path, "fit", "-c", demo, *WORDS)
    megalight(tmp_path, "fit", "-c", demo, "-c", lora, *WORDS)
    base, adapters = (tmp_path / "runs" / name / "checkpoints" / "last.ckpt" for name in ("demo", "lora"))
    names = list(checkpoint.open(adapters).tensors)
    assert names
    assert all(".lora_" in name for name in names)
    merged = tmp_path / "merged"
    said = megalight(tmp_path, "merge", str(adapters), "--base", str(base), "--output", str(merged))
    assert "merged the adapters of 16 linear layers" in said
    prompt = ["--prompt", "to be", "-n", "4", "-t", "0"]
    expected = megalight(tmp_path, "generate", str(adapters), "--base", str(base), *prompt)
    assert megalight(tmp_path, "generate", str(merged), *prompt) == expected
