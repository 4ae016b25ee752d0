"""The recipe of CUDA graphs, stacked on the demo's: without a GPU it says so and trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.recipes.test_layouts import RECIPES, SHORT, _data

__all__ = ["_data"]  # the corpus, made before each test


@pytest.mark.full
def test_the_recipe_of_graphs(tmp_path: Path) -> None:
    words = [
        *(word for word in SHORT if not word.startswith("--trainer.callbacks")),
        "--trainer.devices=1",
        "--trainer.strategy.tensor_parallel=1",
        "--trainer.strategy.sequence_parallel=false",
        f"--trainer.default_root_dir={tmp_path / 'run'}",
    ]
    recipes = ["-c", str(RECIPES / "demo.yaml"), "-c", str(RECIPES / "cuda-graph.yaml")]
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "WORLD_SIZE", "RANK")}
    run = subprocess.run(
        [sys.executable, "-m", "megalight", "fit", *recipes, *words],
        cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    said = "CUDAGraph: steps run eagerly: there are no CUDA graphs on cpu" in run.stderr
    assert said or torch.cuda.is_available()
