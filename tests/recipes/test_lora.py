"""The recipe of adapters: fine-tunes what the demo's recipe has trained, and is merged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megalight import checkpoint
from tests.recipes.test_pipeline import RECIPES, SHORT, _data

__all__ = ["_data"]  # the corpus, made before each test

WORDS = [
    *(word for word in SHORT if not word.startswith("--trainer.callbacks")),
    "--trainer.devices=1",
    "--trainer.strategy.tensor_parallel=1",
    "--trainer.strategy.sequence_parallel=false",
]


def megalight(folder: Path, *words: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "WORLD_SIZE", "RANK")}
    run = subprocess.run(
        [sys.executable, "-m", "megalight", *words],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


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
