"""The rows of large tables that run by default are a pairwise cover of all rows, and none of them is idle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import DataParallelOptions, Layout
from tests.models import test_gpt_megatron, test_vlm_strategy
from tests.strategies import (
    test_full_sharding_matrix,
    test_layouts,
    test_moe_layouts,
    test_parity,
    test_towers,
)
from tests.support.cover import Row, idle, missing, rows_of
from tests.towers import test_training

AXES = {
    "tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "context_parallel": "cp",
    "virtual_pipeline": "vpp",
    "expert_parallel": "ep",
    "expert_tensor_parallel": "etp",
}


def features_of(options: dict[str, Any], ranks: int) -> set[str]:
    """What options of a strategy mean on so many ranks."""
    found = {name for key, name in AXES.items() if options.get(key, 1) > 1}
    for key in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        ranks //= options.get(key, 1)
    pipeline, context = options.get("pipeline"), options.get("context")
    recompute, data = (
        options.get("recompute") or RecomputeOptions(),
        options.get("data_parallel") or DataParallelOptions(),
    )
    facts = {
        "dp": ranks > 1,
        "sp": options.get("sequence_parallel", False),
        "uneven": options.get("pipeline_layout") is not None,
        "zero bubble": pipeline is not None and pipeline.schedule == "zero_bubble",
        "recompute": recompute.granularity != "none",
        "tower recompute": recompute.vision is not None,
        "optim_grads_params": options.get("sharded", False),
        "units": data.units != DataParallelOptions().units,
        data.level: data.level != DataParallelOptions().level,
    }
    if context is not None:
        facts[context.kind] = context.kind != "auto"
    return found | {name for name, there in facts.items() if there}


def of_layouts(row: test_layouts.Row) -> tuple[int, set[str], set[str]]:
    found = {name for name, there in test_layouts.features(row).items() if there}
    same = {"full": "recompute", "selective": "recompute", **dict.fromkeys(test_layouts.KINDS, "cp")}
    return row.world, found | {same[name] for name in found & same.keys()}, {f"GPT {row.config}"}


def of_parity(row: tuple[str, int, bool, int, str]) -> tuple[int, set[str], set[str]]:
    name, tp, sp, dp, level = row
    facts = {
        "tp": tp > 1,
        "sp": sp,
        "dp": dp > 1,
        "no_shard": level == "no_shard" and dp > 1,
        "tied": test_parity.CONFIGS[name].tie_embeddings,
        "one device": tp * dp == 1,
    }
    return tp * dp, {name for name, there in facts.items() if there}, {f"GPT {name}"}


def of_sharding(layout: str, level: str, _: float) -> tuple[int, set[str], set[str]]:
    ranks, _, options = test_full_sharding_matrix.LAYOUTS[layout]
    return ranks, {level, *features_of(options, ranks)}, set()


def of_experts(layout: dict[str, Any]) -> tuple[int, set[str], set[str]]:
    return layout["world"], features_of(test_moe_layouts.options_of(layout), layout["world"]), set()


DEPTHS_OF = {"deep": "llava", "deep_qwen": "qwen", "deep_qwen3": "qwen3"}
"""Models with more layers -> the same with fewer."""


def of_images(name: str, counts: str, layout: str | None, found: set[str]) -> tuple[set[str], set[str]]:
    """Features, and what counts alone: each model, also divided; each number of images; stages of a tower or a head."""
    model = name.removesuffix("_rows")
    model = DEPTHS_OF.get(model, model)
    alone = {model, f"{counts} images"}
    if "tower cp" in found and test_vlm_strategy.CONFIGS[name].vision.class_token:
        alone.add("class tokens on several ranks")
    if found & {"tp", "tower tp"}:
        alone.add(f"{model} divided")
    if layout is not None:
        alone |= {name for name, there in {"E|": layout.startswith("E|"), "|L": layout.endswith("|L")}.items() if there}
    return found | ({"rows with a loss"} if name in test_vlm_strategy.WITH_ROWS else set()), alone


def of_vlm(row: tuple[str, str, int, dict[str, Any]]) -> tuple[int, set[str], set[str]]:
    name, counts, ranks, options = row
    found, alone = of_images(name, counts, options.get("pipeline_layout"), {"together", *features_of(options, ranks)})
    return ranks, found, alone | ({"one device"} if ranks == 1 else set())


def of_towers(where: str, row: tuple[str, str, int, Layout, dict[str, Any]]) -> tuple[int, set[str], set[str]]:
    """A disjoint tower has ranks of its own; a colocated one has another layout on all ranks."""
    name, counts, ranks, tower, language = row
    own, rest = (tower.ranks, ranks - tower.ranks) if where == "disjoint" else (ranks, ranks)
    towers = {f"tower {each}" for each in features_of(vars(tower), own)}
    found = {where, *features_of(language, rest), *towers}
    return ranks, *of_images(name, counts, language.get("pipeline_layout"), found)


def of_weights(form: str, case: str) -> tuple[int, set[str], set[str]]:
    """What the checkpoint holds beside weights, what its model is made of, and how the tensors are stored."""
    config, make = test_gpt_megatron.CASES[case]
    facts = {
        "experts": config.moe is not None,
        "dense": config.moe is None,
        "mixers": config.mamba is not None,
        "depths": config.mtp is not None,
    }
    stored = "layers stacked" if "stacked" in case else "experts apart" if "apart" in case else "plain"
    named = make.__name__ if stored == "plain" and "wrapped" not in case else "theirs"
    return 1, {form, f"named as {named}", *(name for name, there in facts.items() if there)}, {stored}


def tables() -> dict[str, tuple[list[Row], list[Row]]]:
    """Name -> rows of tables that need a cover, and rows of others whose pairs count."""
    trained = "test_layout_trains_the_same_model"
    layouts = rows_of(test_layouts.test_layout_trains_the_same_model, of_layouts)
    sharding = rows_of(test_full_sharding_matrix.test_equals_one_device, of_sharding)
    experts = rows_of(test_moe_layouts.test_the_same_run_as_on_one_device, of_experts)
    parity = rows_of(test_parity.test_layout_trains_the_same_model, of_parity)
    parity += rows_of(test_parity.test_every_layout_trains_the_same_model, of_parity)
    images = rows_of(getattr(test_vlm_strategy, trained), of_vlm)
    for where, test in (("disjoint", trained), ("colocated", "test_colocated_layout_trains_the_same_model")):
        loop = getattr(test_training, f"test_{where}_models_train_as_one_device")
        for driver in (loop, getattr(test_towers, test)):
            images += rows_of(driver, lambda row, where=where: of_towers(where, row))
    weights, whole, pieces = (
        rows_of(test, lambda case, form=form: of_weights(form, case))
        for form, test in {
            "weights": test_gpt_megatron.test_every_weight_is_imported,
            "states": test_gpt_megatron.test_optimizer_state_is_imported,
            "states in pieces": test_gpt_megatron.test_optimizer_state_in_flat_pieces_is_imported,
        }.items()
    )
    return {
        "parity": (parity, layouts),
        "images": (images, layouts + sharding + experts),
        "Megatron's checkpoints": (whole + pieces, weights),
    }


TABLES = tables()
RANKS = 4


@pytest.mark.parametrize("name", TABLES)
def test_default_rows_have_every_pair_that_any_row_has(name: str) -> None:
    lacking = missing(*TABLES[name], ranks=RANKS)
    assert not lacking, "only rows marked full have:\n" + "\n".join(f"{pair}: {row}" for pair, row in lacking.items())
    assert all(row.ranks <= RANKS for row in TABLES[name][0] if row.default)


@pytest.mark.parametrize("name", TABLES)
def test_no_default_row_is_idle(name: str) -> None:
    """Without any of them, a pair would be missing: one that is marked full by mistake is found by the test above."""
    rows, others = TABLES[name]
    assert not (surplus := idle(rows, others)), "mark one of these full, then see again:\n" + "\n".join(surplus)
    default = next(row for row in rows if row.default)
    moved = [replace(row, default=False) if row is default else row for row in rows]
    assert missing(moved, others, RANKS)
