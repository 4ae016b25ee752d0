"""Hybrids with Gated DeltaNet under all layouts: the same losses, gradients and weights as on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.errors import LayoutError
from megalight.models.gpt import GPT, DeltaNetConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.parallel.apply import parallelize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import PipelineOptions
from tests.strategies.training import CONFIGS, assert_same_run, by_hand, fit
from tests.support.workers import run

HYBRID = replace(
    CONFIGS["gqa"],
    num_layers=4,
    layer_pattern="G*-G",
    delta=DeltaNetConfig(num_heads=8, num_key_heads=2, head_dim=4, key_dim=3),
)
PP = {"pipeline_parallel": 2, "micro_batch_size": 1}
TP = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: list[Any] = [
    (2, {**TP, "recompute": RecomputeOptions(granularity="selective", modules=("delta",))}),
    (4, {**PP, "context_parallel": 2, "virtual_pipeline": 2}),
    *[
        pytest.param(*row, marks=pytest.mark.full)
        for row in [
            (1, {"recompute": RecomputeOptions(granularity="full", num_layers=2)}),
            (2, {"tensor_parallel": 2}),
            (4, {"tensor_parallel": 4}),  # key heads on two ranks each
            (2, {**PP, "pipeline": PipelineOptions(schedule="zero_bubble")}),
            (4, {"context_parallel": 4}),
            (4, {**TP, "context_parallel": 2}),
            (4, {**PP, **TP}),
        ]
    ],
]


@functools.cache
def expected() -> dict[str, Any]:
    return by_hand(HYBRID, packed=True)


def _rank(options: dict[str, Any]) -> dict[str, Any]:
    return fit(HYBRID, packed=True, **options)


@pytest.mark.parametrize(("ranks", "options"), LAYOUTS, ids=str)
def test_layout_trains_the_same_model(ranks: int, options: dict[str, Any]) -> None:
    assert_same_run(run(_rank, ranks, options)[0], expected())


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tp": 3}, "units"),
        ({"cp": 3}, r"delta\.tokens: 8 heads in 2 groups on each rank cannot be divided over cp=3"),
    ],
)
def test_degrees_that_do_not_divide(mesh: dict[str, int], message: str) -> None:
    with torch.device("meta"):
        model = GPT(HYBRID)
    (degree,) = mesh.values()
    with pytest.raises(LayoutError, match=message):
        parallelize(model, gpt_plan(model), ParallelMesh(degree, 0, **mesh))
