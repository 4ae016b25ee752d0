"""The JSON schema takes every recipe and finds misspelled keys; shells complete the same options."""

import contextlib
import io
import json
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from megalight.cli.all_options import Schema
from megalight.cli.main import main
from megalight.cli.named_recipes import recipes
from megalight.cli.verbs import TRAINER_VERBS, VERBS
from tests.support.source import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
DEMO = (ROOT / "recipes" / "demo.yaml").read_text()


@pytest.fixture(scope="module")
def validator():
    schema = Schema().build()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def errors(validator, config):
    found = (jsonschema.exceptions.best_match([error]) for error in validator.iter_errors(config))
    return [(".".join(map(str, error.absolute_path)), error.message) for error in found]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(path, validator):
    assert errors(validator, yaml.safe_load(path.read_text())) == []


def test_named_recipes_are_valid(validator):
    for recipe in list(recipes().values())[::5]:
        assert errors(validator, recipe.configuration) == []


@pytest.mark.parametrize(
    ("right", "wrong", "place"),
    [
        ("max_steps:", "max_step:", "trainer"),
        ("tensor_parallel:", "tensor_paralel:", "trainer.strategy.init_args"),
        ("every_n_train_steps:", "every_n_train_step:", "trainer.callbacks.0.init_args"),
        ("num_layers:", "num_layer:", "model.init_args.config"),
        ("betas:", "beta:", "model.init_args.optimizer"),
        ("global_batch_size:", "globalbatch_size:", "data.init_args"),
        ("num_layers: 4", "num_layers: four", "model.init_args.config.num_layers"),
        ("seed_everything:", "seed:", ""),
    ],
)
def test_mistakes_are_found_where_they_are(right, wrong, place, validator):
    (found,) = errors(validator, yaml.safe_load(DEMO.replace(right, wrong, 1)))
    assert found[0] == place
    assert wrong.split(":")[0] in found[1] or "four" in found[1]


def test_classes_of_users_take_any_arguments(validator):
    config = {"model": {"class_path": "mine.Model", "init_args": {"anything": 1}}}
    assert errors(validator, config) == []
    assert errors(validator, {"trainer": {"plugins+": ["mine.Plugin"]}}) == []
    assert errors(validator, {"trainer": {"strategy": {"init_args": {"tensor_parallel": 2}}}}) == []
    assert errors(validator, {"trainer": {"strategy": {"init_args": {"static_graph": True}}}}) != []


def test_editors_show_what_arguments_mean(validator):
    options = validator.schema["$defs"]["megalight.strategies.megatron.MegatronStrategy"]["properties"]
    assert "weights are split" in options["tensor_parallel"]["description"]
    assert options["start_method"]["enum"] == ["auto", "popen", "fork", "spawn"]


def test_the_command_writes_a_file(tmp_path, capsys):
    file = tmp_path / "schema.json"
    assert main(["schema", "-o", str(file)]) == 0
    assert json.loads(file.read_text()) == json.loads(json.dumps(Schema().build()))
    assert main(["schema", "-o", str(tmp_path / "absent" / "x.json")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("megalight fit --trainer.strategy.tensor_p", ["--trainer.strategy.tensor_parallel"]),
        ("megalight fit --model.config.attention.windo", "--model.config.attention.window"),
        ("megalight insp", ["inspect"]),
        ("megalight generate --max-new", ["--max-new-tokens"]),
    ],
)
def test_bash_completes(typed, expected, completions):
    words = typed.split()
    probe = f"""
source {completions}
COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}
_shtab_megalight
echo "${{COMPREPLY[@]}}"
"""
    found = subprocess.run(["bash", "-c", probe], capture_output=True, text=True, check=True).stdout.split()
    assert found == expected if isinstance(expected, list) else expected in found


@pytest.fixture(scope="module")
def completions(tmp_path_factory) -> Path:
    """The script for bash."""
    file = tmp_path_factory.mktemp("bash") / "megalight"
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main(["completion", "bash"]) == 0
    file.write_text(text.getvalue())
    return file


def test_every_command_is_completed(completions, capsys):
    functions = completions.read_text().replace("-", "_")
    assert all(f"_shtab_megalight_{verb.replace('-', '_')}_" in functions for verb in (*TRAINER_VERBS, *VERBS))
    assert main(["completion", "zsh"]) == 0
    assert "#compdef megalight" in capsys.readouterr().out
