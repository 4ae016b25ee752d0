"""The page of every option: it agrees with the classes themselves, and follows what the command names."""

import inspect
import re

import pytest

from megalight.callbacks import EMA
from megalight.cli.all_options import SHOWN as CLASSES
from megalight.cli.all_options import defaults, options, page
from megalight.cli.config_args import find_class
from megalight.cli.main import main
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
    shown, checked = defaults(find_class(CLASSES[key])), 0
    for name, default in arguments(SHOWN[key]).items():
        if isinstance(default, bool | int | float | str):
            assert shown[name] == str(default)
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
    assert set(re.findall(r"^  --trainer\.callbacks\.(\w+) ", text, re.MULTILINE)) == set(arguments(EMA))


def test_a_class_that_is_not_there():
    assert "model: there is no such class." in page("fit", ["--model=absent_module.Odd"])


def test_kinds():
    kinds = {option.key: option.kind for option in options("s", find_class(CLASSES["trainer.strategy"]))}
    assert kinds["s.tensor_parallel"] == "int"
    assert kinds["s.start_method"] == "auto|popen|fork|spawn"
    assert kinds["s.micro_batch_size"] == "int|auto|null"
    assert kinds["s.pipeline.messages"] == "auto|plain|symmetric"  # an alias
    assert kinds["s.plan"] == "ParallelizePlan | None"
