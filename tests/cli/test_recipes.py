"""Every named recipe splits its model on a fake mesh of its GPUs, and its configuration is one of the command."""

import importlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml

from megalight.cli import named_recipes
from megalight.cli.main import main
from megalight.cli.named_recipes import recipes
from megalight.cli.verbs import recipes as verb
from megalight.models.family import families
from megalight.parallel.apply import check_split
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import MegatronStrategy
from megalight.strategies.user_module import layout_for

RECIPES = recipes()


@pytest.mark.parametrize("preset", sorted({name.partition("-")[0] for name in RECIPES}))
def test_models_split_over_the_gpus_of_their_recipes(preset):
    """Four layers, among which Llama 4 has all of its kinds, or one of each kind; on the first and the last rank."""
    known = next(known for known in families() if preset in known.presets)
    kinds = "".join(dict.fromkeys(getattr(known.presets[preset], "layer_pattern", "")))
    short = {"num_layers": len(kinds), "layer_pattern": kinds} if kinds else {"num_layers": 4}
    module = known.module()(replace(known.presets[preset], **short))
    for name, recipe in RECIPES.items():
        if not name.startswith(f"{preset}-"):
            continue
        trainer = recipe.configuration["trainer"]
        options = dict(trainer["strategy"]["init_args"])
        recompute = RecomputeOptions(**options.pop("recompute", {}))
        strategy = MegatronStrategy(**options, recompute=recompute)
        for rank in (0, trainer["devices"] - 1):
            mesh = strategy.grid(trainer["devices"], rank)
            assert mesh.tp == recipe.tensor_parallel
            with torch.device("meta"):
                model = module.build_model()
            check_split(
                model, mesh, layout_for(module, model, strategy.part_layout), torch.bfloat16, torch.device("cpu")
            )
        data = recipe.configuration["data"]["init_args"]
        assert data["sequence_length"] <= known.presets[preset].max_sequence_length
        assert data["global_batch_size"] % mesh.dp == 0
        assert (data["global_batch_size"] // mesh.dp) % strategy.micro_batch_size == 0


def test_the_state_fits_and_a_smaller_degree_would_not():
    for name, recipe in RECIPES.items():
        if "-pretrain-" not in name:
            continue
        degree, gpus = recipe.tensor_parallel, recipe.configuration["trainer"]["devices"]

        def state(degree, gpus=gpus, parameters=recipe.parameters):
            return (6 + 12 * degree / gpus) * parameters / degree

        assert state(degree) <= named_recipes.STATE_BYTES
        assert degree == 1 or state(degree // 2) > named_recipes.STATE_BYTES
    assert "llama3_405b-pretrain-8xGPU" not in RECIPES


@pytest.mark.parametrize("name", ["gpt2_small-pretrain-1xGPU", "llama3_8b-lora-8xGPU", "bert_base-pretrain-4xGPU"])
def test_a_printed_recipe_is_a_configuration(name, tmp_path, capsys):
    assert main(["recipes", name]) == 0
    path = tmp_path / "mine.yaml"
    path.write_text(capsys.readouterr().out)
    assert main(["fit", "-c", str(path), "--print_config=skip_null"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    given = yaml.safe_load(path.read_text())
    assert printed["trainer"]["devices"] == given["trainer"]["devices"]
    assert printed["data"]["init_args"]["global_batch_size"] == given["data"]["init_args"]["global_batch_size"]


def test_the_list_names_every_recipe_and_misspellings_are_helped(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    assert main(["recipes", "llama3_8b-pretrain-8xGPUs"]) == 2
    assert "'llama3_8b-pretrain-8xGPU'" in capsys.readouterr().err


def test_names_are_checked_without_torch():
    code = (
        "import sys; from megalight.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    for words, hint in (
        (["recipes", "llama3-pretrain-8xGPU"], "Did you mean 'llama3_8b-pretrain-8xGPU'?"),
        (["recipes", "bert_base-lora-1xGPU"], "Did you mean 'bert_base-pretrain-1xGPU'?"),
        (["inspect", __file__], "is no checkpoint"),
    ):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert hint in done.stderr


def test_names_of_presets_are_read_from_their_source():
    for module in verb.PRESETS:
        registered = importlib.import_module(module).PRESETS
        assert sorted(verb.preset_names(module)) == sorted(registered)
