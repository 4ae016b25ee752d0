"""The short help names options that exist."""

import pytest

from megalight.cli.main import OPTIONS, main, short_help
from megalight.cli.verbs import TRAINER_VERBS

WORDS = ["--model=GPTModule", "--data=GPTDataModule"]
VALUES = {"X": "1", "N": "1", "NAME": "auto", "PRESET": "llama3_8b", "PATH": "x", "CLASS": None, "PREFIX": None}


def test_every_option_is_known_to_the_parser(tmp_path, capsys):
    """Each option, with a value of its kind, parses; ``--print_config`` then ends the command."""
    options = [option for section in OPTIONS.values() for option in section if option.startswith("--")]
    words = []
    for option in options:
        key, _, value = option.partition("=")
        if value and (given := VALUES.get(value, value)) and key not in ("--trainer.accelerator", "--trainer.strategy"):
            words.append(f"{key}={given if key != '--trainer.precision' else 'bf16-mixed'}")
    words = [word for word in words if "model.config=" not in word]
    assert len(words) > 20
    assert main(["fit", *WORDS, *words, "--data.data=x", "--print_config"]) == 0
    text = capsys.readouterr().out
    assert "lr: 1" in text


@pytest.mark.parametrize("verb", TRAINER_VERBS)
def test_the_page_fits_on_a_screen(verb, capsys):
    assert main([verb, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.strip() == short_help(verb)
    assert len(page.splitlines()) < 50
    assert max(map(len, page.splitlines())) < 130
    assert ("--trainer.max_steps" in page) == (verb == "fit")
