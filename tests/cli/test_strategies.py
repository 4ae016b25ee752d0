"""The command's default strategy is MegatronStrategy, and its registered names take arguments."""

import pytest

from megalight.cli.lightning import MegalightCLI, with_strategy_classes
from megalight.strategies import MegatronStrategy

CLASS = "--trainer.strategy=megalight.strategies.MegatronStrategy"
WORDS = ["--model=tests.cli.samples.SampleModule", "--trainer.accelerator=cpu", "--trainer.logger=false"]


def test_names_are_written_out():
    assert list(with_strategy_classes(["--trainer.strategy=megatron", "--x=1"])) == [CLASS, "--x=1"]
    assert list(with_strategy_classes(["--trainer.strategy", "Megatron", "-c", "a"])) == [CLASS, "-c", "a"]
    assert list(with_strategy_classes(["--trainer.strategy=megatron_fsdp"])) == [
        CLASS.replace("Megatron", "MegatronFSDP")
    ]
    assert list(with_strategy_classes(["--trainer.strategy=megatron_notebook"])) == [
        CLASS,
        "--trainer.strategy.start_method=fork",
    ]


@pytest.mark.parametrize(
    "words", [["--trainer.strategy=ddp"], ["--trainer.strategy", "a.B"], ["--trainer.strategy"], ["--model=megatron"]]
)
def test_other_words_stay(words):
    assert list(with_strategy_classes(words)) == words


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], None),
        (["--trainer.strategy=megatron"], None),
        ([], "trainer: {strategy: megatron}"),
        ([], "trainer: {devices: 1}"),
        (["--trainer.strategy=MegatronStrategy"], "trainer: {strategy: ddp}"),
    ],
)
def test_arguments_of_the_default_strategy(words, text, tmp_path):
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
        words = ["-c", str(tmp_path / "c.yaml"), *words]
    cli = MegalightCLI(args=[*WORDS, *words, "--trainer.strategy.micro_batch_size=3"], run=False)
    assert type(cli.trainer.strategy) is MegatronStrategy
    assert cli.trainer.strategy.micro_batch_size == 3


def test_another_strategy_is_still_chosen_by_name():
    cli = MegalightCLI(args=[*WORDS, "--trainer.strategy=auto", "--trainer.devices=1"], run=False)
    assert not isinstance(cli.trainer.strategy, MegatronStrategy)
