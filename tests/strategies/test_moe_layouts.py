"""Experts in many layouts: each run equals that of one device, gradients tensor by tensor.

The layouts cover all pairs of values of the options below. ``make test`` runs a few that cover the most pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from megalight.models.gpt import GPTConfig
from megalight.nn.moe import BalanceConfig, MoEConfig, RouterConfig, SharedConfig
from megalight.parallel.expert import ExpertOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import PipelineOptions
from tests.strategies.training import (
    BASE,
    Gradients,
    assert_same_gradients,
    assert_same_run,
    by_hand,
    fit,
)
from tests.support.workers import run

CONFIG = replace(
    BASE,
    num_layers=4,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=12,
        pattern=(False, True, True),  # a stage may have experts in both of its layers, or in one
        router=RouterConfig(top_k=2, bias=True),
        balance=BalanceConfig(aux_loss=0.1, seq_aux_loss=0.05, z_loss=0.01),
        shared=SharedConfig(ffn_hidden_size=8, gate=True),
        clamp=0.3,
        glu_offset=0.5,
    ),
)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "world": (2, 4),
    "ep": (1, 2, 4),
    "etp": (1, 2),
    "tp": (1, 2),
    "cp": (1, 2),
    "pipeline": ("none", "plain", "interleaved", "zero_bubble"),
    "dispatcher": ("all_to_all", "all_gather"),
    "hidden": ("nothing", "combined", "shared"),  # messages of experts: by another micro-batch, or a shared expert
    "again": ("nothing", "layers", "act", "experts"),
    "level": ("optim", "no_shard"),
}
RECOMPUTE = {
    "nothing": RecomputeOptions(),
    "layers": RecomputeOptions(granularity="full"),
    "act": RecomputeOptions(granularity="selective", modules=("moe_act", "layernorm", "mlp.shared.act")),
    "experts": RecomputeOptions(granularity="selective", modules=("moe", "attention_norm")),
}


def possible(layout: dict[str, Any]) -> bool:
    pp = 1 if layout["pipeline"] == "none" else 2
    hides = layout["hidden"] != "nothing"
    if hides and (layout["dispatcher"] != "all_to_all" or layout["pipeline"] == "zero_bubble"):
        return False
    if layout["hidden"] == "shared" and layout["again"] == "act":  # would compute the shared expert again
        return False
    divides = layout["world"] % (layout["tp"] * layout["cp"] * pp) == 0
    return divides and layout["world"] % (layout["ep"] * layout["etp"] * pp) == 0 and layout["ep"] * layout["etp"] > 1


def pairs(layout: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [*combinations(layout.items(), 2)]  # in one order: sums of floats choose the same layouts in every process


def covering(count: int) -> Iterator[dict[str, Any]]:
    """Layouts that each add the most new pairs of values; then those that repeat pairs least."""
    every = [dict(zip(OPTIONS, values, strict=True)) for values in product(*OPTIONS.values())]
    left = [layout for layout in every if possible(layout)]
    numbers: dict[tuple[Any, ...], int] = {}
    # An array, because thousands of layouts are weighed for each that is chosen, whenever tests are collected.
    has = np.array([[numbers.setdefault(pair, len(numbers)) for pair in pairs(layout)] for layout in left])
    worth = np.ones(len(numbers))
    free = np.ones(len(left), bool)
    for _ in range(count):
        best = int(np.where(free, worth[has].cumsum(axis=1)[:, -1], 0).argmax())
        free[best] = False
        worth[has[best]] *= 0.1
        yield left[best]


def name_of(layout: dict[str, Any]) -> str:
    return "-".join(f"{name}{value}" if isinstance(value, int) else value for name, value in layout.items())


def options_of(layout: dict[str, Any]) -> dict[str, Any]:
    pipelines: dict[str, dict[str, Any]] = {
        "none": {},
        "plain": {"pipeline_parallel": 2},
        "interleaved": {"pipeline_parallel": 2, "virtual_pipeline": 2},
        "zero_bubble": {"pipeline_parallel": 2, "pipeline": PipelineOptions(schedule="zero_bubble")},
    }
    options = pipelines[layout["pipeline"]]
    if layout["hidden"] == "combined":
        options["pipeline"] = PipelineOptions(schedule="combined")
    return {
        "expert_parallel": layout["ep"],
        "expert_tensor_parallel": layout["etp"],
        "tensor_parallel": layout["tp"],
        "sequence_parallel": layout["tp"] > 1,
        "context_parallel": layout["cp"],
        "expert": ExpertOptions(layout["dispatcher"], shared_expert_overlap=layout["hidden"] == "shared"),
        "recompute": RECOMPUTE[layout["again"]],
        **options,
    }


@functools.cache
def expected(experts: int = 4, device: str = "cpu") -> dict[str, Any]:
    return by_hand(config_of(experts), 2, device=device, micro_batch_size=1)


def config_of(experts: int) -> GPTConfig:
    assert CONFIG.moe is not None
    return replace(CONFIG, moe=replace(CONFIG.moe, num_experts=experts))


def train(layout: dict[str, Any], experts: int = 4, device: str = "cpu", callbacks: Any = ()) -> dict[str, Any]:
    return fit(
        config_of(experts),
        2,
        {"level": layout["level"]},
        {"accelerator": device},
        extra_callbacks=callbacks,
        micro_batch_size=1,
        **options_of(layout),
    )


def _fit(layout: dict[str, Any], experts: int = 4) -> dict[str, Any]:
    gradients = Gradients()
    found = train(layout, experts, callbacks=[gradients])
    return {**found, "gradients": gradients.first}


LAYOUTS = list(covering(40))
FEW = 3


def marked(number: int, layout: dict[str, Any]) -> Any:
    return pytest.param(layout, marks=[pytest.mark.full] * (number >= FEW), id=name_of(layout))


@pytest.mark.parametrize("layout", [marked(number, layout) for number, layout in enumerate(LAYOUTS)])
def test_the_same_run_as_on_one_device(layout: dict[str, Any]) -> None:
    found = run(_fit, layout["world"], layout)
    assert all(rank["losses"] == found[0]["losses"] for rank in found)
    assert_same_run(found[0], expected())
    assert_same_gradients(found[0]["gradients"], expected()["gradients"])


ALONE = {name: values[0] for name, values in OPTIONS.items()}
WIDE: list[tuple[dict[str, Any], int]] = [
    ({**ALONE, "world": 8, "ep": 2, "tp": 2}, 4),
    ({**ALONE, "world": 8, "ep": 8, "tp": 2}, 8),
    ({**ALONE, "world": 8, "ep": 4, "tp": 2, "pipeline": "plain"}, 8),
    ({**ALONE, "world": 8, "ep": 2, "etp": 2, "tp": 2, "cp": 2, "pipeline": "interleaved"}, 4),
]
"""Layouts of eight ranks, and numbers of experts."""


@pytest.mark.full
@pytest.mark.parametrize(("layout", "experts"), WIDE, ids=[name_of(layout) for layout, _ in WIDE])
def test_eight_ranks_run_as_one_device(layout: dict[str, Any], experts: int) -> None:
    found = run(_fit, 8, layout, experts)
    assert_same_run(found[0], expected(experts))
    assert_same_gradients(found[0]["gradients"], expected(experts)["gradients"])


def test_the_layouts_cover_all_possible_pairs() -> None:
    every = [dict(zip(OPTIONS, values, strict=True)) for values in product(*OPTIONS.values())]
    wanted = set().union(*(pairs(layout) for layout in every if possible(layout)))
    assert len(LAYOUTS) == 40
    assert set().union(*map(pairs, LAYOUTS)) == wanted
