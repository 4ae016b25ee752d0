"""The recipe of Muon: two tensor-parallel processes train as one, with one monitor of all learning rates."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.recipes.test_layouts import RECIPES, SHORT, _data, megalight

__all__ = ["_data"]  # the corpus, made before the test
WORDS = [
    *SHORT,
    "--trainer.callbacks=LearningRateMonitor",
    "--model.config.hidden_size=32",
    "--model.config.ffn_hidden_size=48",
    "--model.config.vocab_size=288",
    "--model.optimizer.muon.lr=0.02",
]
ALONE = ["--trainer.devices=1", "--trainer.strategy.tensor_parallel=1", "--trainer.strategy.sequence_parallel=false"]


@pytest.mark.full
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    losses = []
    for name, words in {"two": [], "one": ALONE}.items():
        run = tmp_path / name
        recipe = ["-c", str(RECIPES / "muon.yaml"), *WORDS, *words, f"--trainer.default_root_dir={run}"]
        megalight(tmp_path, "fit", *recipe)
        (file,) = run.rglob("metrics.csv")
        with file.open() as lines:
            rows = list(csv.DictReader(lines))
        losses.append([float(row["train_loss"]) for row in rows if row["train_loss"]])
        rates = next(row for row in rows if row["lr-Muon/muon/decay"])
        assert (float(rates["lr-Muon/adam/decay"]), float(rates["lr-Muon/muon/decay"])) == (0.003, 0.02)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][2] < losses[0][0]
