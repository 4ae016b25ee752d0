"""The page of every option: it agrees with the classes themselves, and follows what the command names."""

import inspect
import re

import pytest

from megalight.callbacks import EMA
from megalight.cli.all_options import DEFAULTS, options, page, page_of_class
from megalight.cli.main import main
from megalight.cli.signatures import find_class, written
from megalight.cli.trainer import MegalightTrainer
from megalight.cli.verbs import TRAINER_VERBS
from megalight.data.gpt.module import GPTDataModule
from megalight.models.bert import BertModule
from megalight.models.gpt import GPTConfig, GPTModule
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.strategies import MegatronFSDPStrategy, MegatronStrategy

SHOWN = {
    "trainer": MegalightTrainer,
    "trainer.strategy": MegatronStrategy,
    "trainer.strategy.data_parallel": DataParallelOptions,
    "model": GPTModule,
    "model.config": GPTConfig,
    "data": GPTDataModule,
}


def arguments(cls):
    """Name -> default of what a constructor takes, with what it passes on to its base by ``**kwargs``."""
    own = list(inspect.signature(cls.__init__).parameters.values())[1:]
    found = {each.name: each.default for each in own if each.kind is not each.VAR_KEYWORD}
    passed_on = [base for base in cls.__mro__[1:] if "__init__" in vars(base)][:1] if len(found) < len(own) else []
    return {**(arguments(passed_on[0]) if passed_on else {}), **found}


def keys(text, prefix):
    return set(re.findall(rf"^  --{re.escape(prefix)}\.(\w+)=", text, re.MULTILINE))


@pytest.mark.parametrize("key", SHOWN)
def test_every_argument_of_the_class_is_there(key):
    known = set(arguments(SHOWN[key]))
    assert keys(page("fit", []), key) == known
    assert len(known) > 4


@pytest.mark.parametrize("key", ["trainer", "trainer.strategy", "model", "data"])
def test_defaults_are_those_of_the_classes(key):
    shown, checked = written(find_class(DEFAULTS[key])), 0
    for name, default in arguments(SHOWN[key]).items():
        if isinstance(default, bool | int | float | str):
            assert shown[name].default == str(default)
            checked += 1
    assert checked > 0 or key == "model"


def test_the_command_prints_it_with_the_classes_that_it_names(tmp_path, capsys):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("trainer: {strategy: megatron_fsdp}\nmodel: {class_path: BertModule}\n")
    assert main(["fit", "-c", str(recipe), "--help-all"]) == 0
    text = capsys.readouterr().out
    assert keys(text, "model") == set(arguments(BertModule))
    assert keys(text, "trainer.strategy") == set(arguments(MegatronFSDPStrategy))
    assert "classes for trainer.callbacks" in text
    assert ":class:" not in text
    assert "``" not in text


@pytest.mark.parametrize("verb", TRAINER_VERBS)
def test_keys_of_the_verb(verb):
    text = page(verb, [])
    assert ("--verbose" in text) == (verb in ("validate", "test"))
    assert ("--return_predictions" in text) == (verb == "predict")


@pytest.mark.parametrize("words", [["--trainer.callbacks.help", "EMA"], ["--trainer.callbacks.help=EMA"]])
def test_help_of_one_class(words, capsys):
    assert main(["fit", *words]) == 0
    text = capsys.readouterr().out
    assert keys(text, "trainer.callbacks") == set(arguments(EMA))
    assert text.startswith("trainer.callbacks: EMA. ")


def test_help_of_a_default_and_of_a_class_that_nobody_can_read(tmp_path, monkeypatch):
    assert page_of_class("fit", ["--model.help", "--trainer.max_steps=3"]).startswith("model: GPTModule.")
    (tmp_path / "odd_module.py").write_text("Odd = make()\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert page_of_class("fit", ["--model.help", "odd_module.Odd"]) is None
    assert page_of_class("fit", ["--trainer.max_steps=3"]) is None
    assert "its class does not list the options" in page("fit", ["--model=odd_module.Odd"])


def test_kinds():
    kinds = {option.key: option.kind for option in options("s", find_class(DEFAULTS["trainer.strategy"]))}
    assert kinds["s.tensor_parallel"] == "int"
    assert kinds["s.start_method"] == "auto|popen|fork|spawn"
    assert kinds["s.micro_batch_size"] == "int|auto|null"
    assert kinds["s.pipeline.messages"] == "auto|plain|symmetric"  # an alias
    assert kinds["s.plan"] == "ParallelizePlan | None"
