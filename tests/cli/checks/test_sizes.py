"""Sizes that do not fit are found with torch, before Lightning is imported, in the words of the run's own checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from megalight.cli.checks import early, sizes
from megalight.errors import LayoutError, MegalightError
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.strategies import MegatronStrategy
from tests.cli.checks.test_early import PROBE

CONFIG = {"num_layers": 4, "hidden_size": 12, "num_heads": 6, "vocab_size": 32, "max_sequence_length": 8}
RECIPE = ["--trainer.accelerator=cpu", "--model=GPTModule", *(f"--model.config.{k}={v}" for k, v in CONFIG.items())]
MISTAKES = [
    (["--model.config.num_heads=5"], "hidden_size 12 is not a multiple of num_heads 5"),
    (["--model.config.norm.eps=-1e-5"], "norm.eps is -1e-05"),
    (["--model.config.mixer_pattern=[attentio]"], "Did you mean 'attention'?"),
    (["--data=GPTDataModule", "--data.sequence_length=9"], "longer than the model's max_sequence_length=8"),
    (["--data=GPTDataModule", "--data.sequence_length=8"], ""),
    (["--trainer.devices=3", "--trainer.strategy.tensor_parallel=2"], "world size 3 is not a multiple"),
    (["--trainer.devices=4", "--trainer.strategy.tensor_parallel=4"], "consists of 6 units"),
    (["--trainer.devices=3", "--trainer.strategy.pipeline_parallel=3"], "4 layers do not divide evenly over 3 stages"),
    (["--trainer.devices=2", "--trainer.strategy.expert_parallel=2"], "ep=2 divides experts over ranks"),
    (["--model.config=llama3_8b", "--trainer.devices=16", "--trainer.strategy.tensor_parallel=16"], ""),
    (["--model.config=llama3_8b", "--trainer.devices=3", "--trainer.strategy.tensor_parallel=3"], "and tp=3"),
]


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    """All mistakes, one after another in one process."""
    commands = [["fit", *RECIPE, *words] for words, message in MISTAKES if message]
    done = subprocess.run([sys.executable, "-c", PROBE], input=json.dumps(commands), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, heavy = json.loads(done.stdout)
    assert heavy == ["torch"]
    return found


def test_they_are_found_without_lightning(answers: list[Any]) -> None:
    for (code, text), message in zip(answers, [message for _, message in MISTAKES if message], strict=True):
        assert code == 2
        assert message in text.replace("\n  ", " ")


@pytest.mark.parametrize("words", [MISTAKES[0][0], MISTAKES[6][0]], ids=["size", "split"])
def test_heads_are_checked_without_torch(words: list[str]) -> None:
    (message,) = (message for each, message in MISTAKES if each == words)
    commands = json.dumps([["fit", *RECIPE, *words]])
    done = subprocess.run([sys.executable, "-c", PROBE], input=commands, capture_output=True, text=True)
    (((code, text),), heavy) = json.loads(done.stdout)
    assert (code, heavy) == (2, [])
    assert message in text.replace("\n  ", " ")


@pytest.mark.parametrize("words", [words for words, message in MISTAKES if not message])
def test_what_fits_passes(words: list[str]) -> None:
    early.check("fit", [*RECIPE, *words])


def test_the_run_says_the_same(tmp_path: Path) -> None:
    with pytest.raises(LayoutError) as early_error:
        early.check("fit", [*RECIPE, "--trainer.devices=4", "--trainer.strategy.tensor_parallel=4"])
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    trainer = pl.Trainer(accelerator="cpu", devices=4, strategy=MegatronStrategy(tensor_parallel=4), **options)
    with pytest.raises(LayoutError) as error:
        trainer.fit(GPTModule(GPTConfig(**CONFIG)))
    assert str(error.value) == str(early_error.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.devices=3", "--trainer.strategy.pipeline_parallel=3", "--trainer.strategy.pipeline_layout=Et*4L"],
        ["--trainer.devices=auto", "--trainer.strategy.tensor_parallel=4"],
        ["--trainer.devices=-1", "--trainer.strategy.tensor_parallel=2"],
        ["--trainer.devices=4", "--trainer.strategy=ddp"],
        ["--model.config.num_heads=5", "--model=tests.cli.samples.SampleModule"],
        ["--model.config.num_layers=4.0"],
        ["--model.config.num_heads=5", "--model.config.head_dim=4"],
        ["--model.config=no_preset"],
        ["--model.config=null", f"--model.weights={Path(__file__).parent}"],
    ],
)
def test_what_more_than_plain_values_decides_is_left_to_the_run(words: list[str]) -> None:
    early.check("fit", [*RECIPE, *words])


def test_ranks_that_were_started_do_not_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*RECIPE, "--model.config.num_heads=5"]
    with pytest.raises(MegalightError):
        early.check("fit", words)
    monkeypatch.setenv("LOCAL_RANK", "1")
    early.check("fit", words)


def test_lists_are_made_again() -> None:
    assert sizes._lists({"a": {"0": 1, "1": {"0": 2}}, "b": {"1": 3}}) == {"a": [1, [2]], "b": {"1": 3}}
