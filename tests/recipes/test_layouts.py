"""Recipes of layouts, stacked on the demo's: two processes that train the model which one process trains."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from megalight.cli.main import main
from tests.support.programs import run_program
from tests.support.source import ROOT

RECIPES = ROOT / "recipes"
SHORT = [
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=3",
    "--trainer.val_check_interval=3",
    "--trainer.limit_val_batches=2",
    "--trainer.log_every_n_steps=1",
    "--trainer.callbacks=[]",
    "--model.optimizer.schedule.warmup=1",
    "--data.sequence_length=64",
]
SMALL = [
    "--model.config.hidden_size=32",
    "--model.config.ffn_hidden_size=48",
    "--model.config.vocab_size=288",
    "--model.optimizer.lr=0.03",
]
"""What makes the demo's own model small."""


def megalight(folder: Path, *words: str) -> str:
    """Run the command in ``folder``, and return what it printed."""
    return run_program("megalight", *words, folder=folder)


def metrics(folder: Path, *words: str) -> dict[str, list[float]]:
    """What a run logs."""
    recipe = ["-c", str(RECIPES / "demo.yaml")]
    megalight(folder.parent, "fit", *recipe, *SHORT, *SMALL, *words, f"--trainer.default_root_dir={folder}")
    (file,) = folder.rglob("metrics.csv")
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    names = ("train_loss", "grad_norm", "val_loss")
    return {name: [float(row[name]) for row in rows if row.get(name)] for name in names}


@pytest.fixture(autouse=True)
def _data(tmp_path: Path) -> None:
    """A corpus where the demo has its own."""
    draw = random.Random(0)
    words = ["to", "be", "or", "not", "that", "is", "the", "question", "whether", "suffer", "slings", "arrows"]
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(" ".join(draw.choices(words, k=600)))
    corpus = str(tmp_path / "runs" / "demo" / "data" / "stdlib")
    options = ["--train-tokenizer", "--vocab-size=280", "--workers=1", "-q"]
    assert main(["prepare", str(tmp_path / "texts"), "-o", corpus, *options]) == 0


STACKED = {
    "pipeline": [],
    "long-context": [
        "--trainer.strategy.context_parallel=2",
        "--trainer.strategy.micro_batch_size=8",
        "--trainer.callbacks.init_args.min_elements=1",
        "--data.global_batch_size=8",
        "--data.sequence_length=64",
    ],
}
"""Recipe -> options that make it as small as the demo."""


@pytest.mark.full
def test_layouts_train_the_same_model(tmp_path: Path) -> None:
    one = ["--trainer.devices=1", "--trainer.strategy.tensor_parallel=1", "--trainer.strategy.sequence_parallel=false"]
    alone = metrics(tmp_path / "one", *one)
    assert len(alone["train_loss"]) == 3
    assert alone["train_loss"][-1] < alone["train_loss"][0] - 1
    for recipe, options in STACKED.items():
        divided = metrics(tmp_path / recipe, "-c", str(RECIPES / f"{recipe}.yaml"), *options)
        for name, values in alone.items():
            assert divided[name] == pytest.approx(values, rel=1e-3), (recipe, name)
