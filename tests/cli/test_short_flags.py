"""Short flags of ``fit`` stand for longer words."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalight.cli.config_args import written_out
from megalight.cli.lightning import MegalightCLI
from megalight.cli.main import main
from megalight.strategies import MegatronStrategy
from tests.cli.test_strategies import WORDS


@pytest.mark.parametrize("flag", [["--export_hf=out/a b"], ["--export_hf", "out/a b"]])
def test_one_more_callback(flag: list[str], tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("trainer: {callbacks: [{class_path: megalight.callbacks.GarbageCollection}]}")
    words = written_out("fit", [*flag, "-c", str(file)])
    cli = MegalightCLI(args=[*WORDS, *words], run=False)
    names = [type(each).__name__ for each in cli.trainer.callbacks]
    assert {"GarbageCollection", "TransformersExport"} <= set(names)
    (export,) = (each for each in cli.trainer.callbacks if type(each).__name__ == "TransformersExport")
    assert export.folder == "out/a b"


@pytest.mark.parametrize("words", [[], ["--resume.optimizer=saved"], ["--resume.optimizer", "configured"]])
def test_what_a_run_goes_on_with(words: list[str]) -> None:
    strategy = MegalightCLI(args=[*WORDS, *written_out("fit", words)], run=False).trainer.strategy
    assert isinstance(strategy, MegatronStrategy)
    assert strategy.checkpoints.resume_optimizer == ("saved" if "--resume.optimizer=saved" in words else "configured")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "--export_hf"], "--export_hf needs a folder"),
        (["fit", "--export_hf", "--trainer.max_steps=1"], "--export_hf needs a folder"),
        (["fit", "--export_hf=a", "--export_hf=b"], "2 times (a, b)"),
        (["validate", "--export_hf=a"], "validate trains none"),
        (["fit", "--resume.optimizer"], "--resume.optimizer needs a word"),
        (["test", "--resume.optimizer=saved"], "test has none"),
        (["fit", *WORDS, "--resume.optimizer=old"], "resume_optimizer"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_other_words_are_still_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The words that the flag became pass the checks of the command."""
    assert main(["fit", f"--export_hf={tmp_path / 'out'}", "--model.wight=1"]) == 2
    assert "wight" in capsys.readouterr().err
