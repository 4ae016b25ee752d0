"""The profiling recipe, stacked on the demo's, in one process; and the callbacks by their bare names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.test_layouts import RECIPES, SHORT, SMALL, _data, megalight

__all__ = ["_data"]  # the corpus, made before each test


@pytest.mark.full
def test_the_profiling_recipe(tmp_path: Path) -> None:
    words = [
        *(word for word in SHORT if not word.startswith("--trainer.callbacks")),
        *SMALL,
        "--trainer.devices=1",
        "--trainer.strategy.tensor_parallel=1",
        "--trainer.strategy.sequence_parallel=false",
        f"--trainer.default_root_dir={tmp_path / 'run'}",
        "--trainer.max_steps=5",
        "--trainer.callbacks+=ProfilerWindow",  # a second one, by its bare name
        "--trainer.callbacks.start_step=2",
        "--trainer.callbacks.stop_step=4",
    ]
    recipes = ["-c", str(RECIPES / "demo.yaml"), "-c", str(RECIPES / "profiling.yaml")]
    megalight(tmp_path, "fit", *recipes, *words)
    (file,) = (tmp_path / "run").rglob("metrics.csv")
    header = file.read_text().splitlines()[0].split(",")
    assert {"time/forward_max_s", "time/first/step_min_s", "startup/all_s", "train_loss"} <= set(header)
    assert (tmp_path / "run" / "profile" / "steps=2-3-rank=0.json.gz").exists()
