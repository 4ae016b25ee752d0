"""Muon in a pairwise cover of layouts, models and rounds: each trains as one device, in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from megalight.optim.whole_matrices import GATHER_BYTES
from megalight.strategies import PipelineOptions
from tests.optim.test_muon import CONFIG, MUON, STEPS, by_hand
from tests.strategies.test_experts import MOE
from tests.strategies.training import BASE, CONFIGS, assert_same_run, fit
from tests.support.cover import pairwise
from tests.support.workers import run

DEEP = replace(BASE, num_layers=4)
MODELS = {
    "dense": DEEP,
    "experts": replace(DEEP, moe=MOE),
    "tied": replace(CONFIGS["tied"], num_layers=4),
}
PIPELINES: dict[str, dict[str, Any]] = {
    "none": {},
    "plain": {"pipeline_parallel": 2},
    "interleaved": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "zero_bubble": {"pipeline_parallel": 2, "pipeline": PipelineOptions(schedule="zero_bubble")},
}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "ranks": (2, 4),
    "tp": (1, 2, 4),
    "cp": (1, 2),
    "ep": (1, 2),
    "etp": (1, 2),
    "pipeline": tuple(PIPELINES),
    "level": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "model": tuple(MODELS),
    "head_dim": (0, 8),
    "gather_bytes": (1, 2**14, GATHER_BYTES),  # each matrix in a round of its own, a few, all
    "bucket_size": (None, 3000),
}
"""A bucket of 3,000 elements begins and ends within matrices of other parameters, and so do the intervals of ranks."""


def possible(layout: dict[str, Any]) -> bool:
    pp = 1 if layout["pipeline"] == "none" else 2
    experts = layout["ep"] * layout["etp"]
    return (
        layout["ranks"] % (layout["tp"] * layout["cp"] * pp) == 0
        and layout["ranks"] % (experts * pp) == 0
        and (experts == 1 or layout["model"] == "experts")
    )


def drawn() -> list[dict[str, Any]]:
    """A few of many that are drawn, with every pair of values that these have."""
    draw = random.Random(0)
    every = [{name: draw.choice(values) for name, values in OPTIONS.items()} for _ in range(3000)]
    rows = [tuple(layout.values()) for layout in every if possible(layout)]
    return [dict(zip(OPTIONS, row, strict=True)) for row in pairwise(rows)]


def _rank(layout: dict[str, Any]) -> dict[str, Any]:
    muon = replace(MUON, head_dim=layout["head_dim"], gather_bytes=layout["gather_bytes"])
    return fit(
        MODELS[layout["model"]],
        STEPS,
        {"level": layout["level"], "bucket_size": layout["bucket_size"]},
        optimizer=replace(CONFIG, muon=muon),
        micro_batch_size=1,
        tensor_parallel=layout["tp"],
        sequence_parallel=layout["tp"] > 1,
        context_parallel=layout["cp"],
        expert_parallel=layout["ep"],
        expert_tensor_parallel=layout["etp"],
        **PIPELINES[layout["pipeline"]],
    )


@pytest.mark.full
@pytest.mark.parametrize("layout", drawn(), ids=lambda each: "-".join(map(str, each.values())))
def test_drawn_layouts_train_as_one_device(layout: dict[str, Any]) -> None:
    found = run(_rank, layout["ranks"], layout, timeout=240)
    expected = by_hand(MODELS[layout["model"]], layout["head_dim"] > 0)
    for rank in found:
        assert_same_run({**rank, "norms": found[0]["norms"]}, expected)
    assert max(expected["norms"]) > 0.5, "nothing was clipped"
