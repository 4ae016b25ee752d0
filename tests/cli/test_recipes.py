"""Every named recipe splits its model on a fake mesh of its GPUs, and its configuration is one of the command."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml

from megalight import strategies
from megalight.cli import named_recipes
from megalight.cli.main import main
from megalight.cli.named_recipes import recipes
from megalight.models.family import families
from megalight.models.gpt.module import GPTModule
from megalight.parallel.apply import check_split
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.estimate import estimate
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies.user_module import layout_for
from tests.support.cover import pairwise

RECIPES = recipes()


SPLIT = ("bert_base", "gemma3_12b", "gpt_oss_120b", "llama3_8b", "qwen3_30b_a3b")
"""Presets that every test run splits: a model of each kind. Whole ones split all."""


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(preset, marks=[pytest.mark.full] * (preset not in SPLIT))
        for preset in sorted({name.partition("-")[0] for name in RECIPES})
    ],
)
def test_models_split_over_the_gpus_of_their_recipes(preset):
    """Four layers, among which Llama 4 has all of its kinds, or one of each kind; on the first and the last rank."""
    known = next(known for known in families() if preset in known.presets)
    kinds = "".join(dict.fromkeys(getattr(known.presets[preset], "layer_pattern", "")))
    modules, checked = {}, set()
    for name, recipe in RECIPES.items():
        if not name.startswith(f"{preset}-"):
            continue
        trainer, degrees = recipe.configuration["trainer"], recipe.degrees
        options = dict(trainer["strategy"]["init_args"])
        recompute = RecomputeOptions(**options.pop("recompute", {}))
        kind = getattr(strategies, trainer["strategy"]["class_path"].rpartition(".")[2])
        strategy = kind(**options, recompute=recompute)
        if (stages := degrees.pipeline) not in modules:
            pattern = kinds * stages
            short = {"layer_pattern": pattern} if kinds else {}
            short["num_layers"] = len(pattern) or max(4, stages)
            modules[stages] = known.module()(replace(known.presets[preset], **short))
        module = modules[stages]
        for rank in (0, trainer["devices"] - 1):
            mesh = strategy.grid(trainer["devices"], rank)
            assert (mesh.tp, mesh.pp, mesh.dp) == (degrees.tensor, stages, degrees.replicas)
            if (degrees.tensor, stages, mesh.dp, rank) in checked:  # jobs share layouts
                continue
            checked.add((degrees.tensor, stages, mesh.dp, rank))
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
        degrees, gpus = recipe.degrees, recipe.configuration["trainer"]["devices"]
        assert degrees.tensor * degrees.pipeline * degrees.replicas == gpus
        assert degrees.state <= named_recipes.STATE_BYTES
        if name.removesuffix(f"-{gpus}xGPU").endswith("-pretrain"):

            def state(degree, gpus=gpus, parameters=recipe.parameters):
                return (6 + 12 * degree / gpus) * parameters / degree

            assert degrees.state == state(degrees.tensor)
            assert degrees.tensor == 1 or state(degrees.tensor // 2) > named_recipes.STATE_BYTES
    assert "llama3_405b-pretrain-8xGPU" not in RECIPES
    assert "llama3_70b-qlora-1xGPU" not in RECIPES  # its weights in bf16, before they are stored


def test_the_memory_is_what_the_engine_will_keep():
    """docs/choose-layout.md has the first two."""
    for name, gib in (("pretrain-4xGPU", 44.9), ("pretrain-8xGPU", 33.7)):
        assert RECIPES[f"llama3_8b-{name}"].degrees.state / 2**30 == pytest.approx(gib, abs=0.1)
    sharded = DataParallelOptions(level="optim_grads_params")
    for preset in ("llama3_8b", "qwen3_0_6b"):
        with torch.device("meta"):
            model = GPTModule(preset).build_model()
        recipe = RECIPES[f"{preset}-pretrain-fsdp-8xGPU"]
        assert recipe.degrees.state == pytest.approx(estimate(model, 8, sharded).device, rel=0.05)
        assert f" {recipe.gib:.0f} GiB" in recipe.describe()


NAMED = [
    "bert_base-pretrain-4xGPU",
    "llama3_8b-pretrain-pp-8xGPU",
    "qwen3_8b-sft-8xGPU",
    "llama3_8b-qlora-1xGPU",
]


def parts(name):
    preset, _, rest = name.partition("-")
    return preset, *rest.rsplit("-", 1)


COVER = ["-".join(row) for row in pairwise(map(parts, RECIPES), map(parts, NAMED))]
"""Each preset with each job and each number of GPUs, and each job with each of these."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name not in NAMED)) for name in COVER])
def test_a_recipe_is_a_configuration_by_its_name_and_as_a_file(name, tmp_path, capsys):
    assert main(["recipes", name]) == 0
    path = tmp_path / "mine.yaml"
    path.write_text(capsys.readouterr().out)
    given = yaml.safe_load(path.read_text())
    assert given == RECIPES[name].configuration
    assert main(["fit", "-c", name, "--print_config=skip_null"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["devices"] == given["trainer"]["devices"]
    assert printed["data"]["class_path"].rpartition(".")[2] == given["data"]["class_path"].rpartition(".")[2]
    assert printed["data"]["init_args"]["global_batch_size"] == given["data"]["init_args"]["global_batch_size"]
    chat = name.rsplit("-", 2)[-2] in ("sft", "lora", "qlora")
    assert chat == given["data"]["class_path"].endswith("SFTDataModule")


def test_a_wrong_name_of_a_recipe_after_c(capsys):
    assert main(["fit", "-c", "llama3_8b-lora-3xGPU"]) == 2
    assert "Did you mean 'llama3_8b-lora-" in capsys.readouterr().err


def test_the_list_names_every_recipe_and_misspellings_are_helped(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    assert main(["recipes", "llama3_8b-pretrain-8xGPUs"]) == 2
    assert "'llama3_8b-pretrain-8xGPU'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("llama3-pretrain-8xGPU", "llama3_8b-pretrain-8xGPU"),
        ("bert_base-lora-1xGPU", "bert_base-pretrain-1xGPU"),
    ],
)
def test_a_name_that_no_recipe_has(name, nearest, capsys):
    assert main(["recipes", name]) == 2
    assert f"Did you mean '{nearest}'?" in capsys.readouterr().err


def test_a_file_that_is_no_checkpoint_is_refused_without_torch():
    code = (
        "import sys; from megalight.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, "inspect", __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is no checkpoint" in done.stderr
