"""The recipe of Muon: two tensor-parallel processes train as one, with one monitor of all learning rates."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.recipes.test_layouts import RECIPES, SHORT, _data, megalight, metrics
from tests.support.pages import blocks
from tests.support.source import ROOT

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


@pytest.mark.full
def test_a_file_of_a_user_adds_an_optimizer_of_whole_matrices(tmp_path: Path) -> None:
    """The example of the page, in a file beside the run, which its recipe names."""
    page = blocks((ROOT / "docs" / "muon.md").read_text(encoding="utf-8"))
    (example,) = (block.text for block in page if "class Whitening(" in block.text)
    (tmp_path / "whitening.py").write_text("from __future__ import annotations\n" + example.split("\nmodel = ")[0])
    words = [
        "--model.optimizer.matrices.class_path=whitening.WhiteningConfig",
        "--model.optimizer.matrices.init_args.lr=0.003",
    ]
    two = metrics(tmp_path / "two", *words)
    one = metrics(tmp_path / "one", *words, *ALONE)
    adam = metrics(tmp_path / "adam", *ALONE)
    for name, values in one.items():
        assert two[name] == pytest.approx(values, rel=1e-3), name
    assert one["train_loss"][-1] < one["train_loss"][0] - 0.1
    assert one["train_loss"][-1] != pytest.approx(adam["train_loss"][-1], rel=1e-2)
