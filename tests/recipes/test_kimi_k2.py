"""The recipe of Kimi-K2 builds on 64 ranks without processes: every rank has its heads and its experts."""

from __future__ import annotations

from dataclasses import replace

import torch
import yaml

from megalight.models.gpt import GPT, GPTModule
from megalight.models.gpt.plan import gpt_plan
from megalight.models.gpt.presets import preset
from megalight.parallel.apply import check_split, parallelize
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import MegatronStrategy
from megalight.strategies.user_module import layout_for
from tests.recipes.test_layouts import RECIPES


def test_the_recipe_of_kimi_k2() -> None:
    recipe = yaml.safe_load((RECIPES / "kimi-k2.yaml").read_text())
    trainer, data = recipe["trainer"], recipe["data"]["init_args"]
    options = dict(trainer["strategy"]["init_args"])
    strategy = MegatronStrategy(**{**options, "recompute": RecomputeOptions(**options.pop("recompute"))})
    world = trainer["num_nodes"] * trainer["devices"]
    config = replace(preset(recipe["model"]["init_args"]["config"]), num_layers=3)  # a dense one, and two with experts
    assert data["global_batch_size"] % world == 0
    for rank in (0, 9, 63):
        mesh = strategy.grid(world, rank)
        assert [mesh.size(axis) for axis in ("tp", "dp", "ep", "etp", "edp")] == [8, 8, 64, 1, 1]
        module = GPTModule(config)
        with torch.device("meta"):
            model = module.build_model()
        check_split(model, mesh, layout_for(module, model, strategy.part_layout), torch.bfloat16, torch.device("cpu"))
        with torch.device("meta"):
            root = GPT(config)
        parallelize(root, gpt_plan(root), mesh, sequence_parallel=True)
        layer = root.layers["2"]
        assert layer.attention.q_up.weight.shape == (64 * 192 // 8, 1536)
        assert layer.attention.kv_up.weight.shape == (64 * 256 // 8, 512)
        assert layer.attention.kv_down.weight.shape == (512 + 64, 7168)
        assert layer.attention.proj.weight.shape == (7168, 64 * 128 // 8)
        assert len(layer.mlp.experts) == 384 // 64
