"""Odd samples under context parallelism and in every pipeline: losses and gradients are those of one device."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest

from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.pipeline.schedules import PipelineOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import Layout
from tests.models.test_vlm_strategy import COUNTS, SP, by_hand, fit
from tests.models.vlm_samples import HUGE
from tests.strategies.training import assert_same_gradients
from tests.support.workers import run

ODD = {
    "in no step": [(0, 0, 0, 0)],
    "in one step": [(0, 0, 0, 0), (1, 0, 0, 3)],
    "in the first": [(3, 0, 0, 0), (0, 0, 0, 0)],
    "in the last": [(0, 0, 0, 2)],
    "around text": [(1, 0, 0, 2), (0, 1, 0, 1)],
    "of one replica": [(0, 0, 3, 2), (1, 3, 0, 0)],
    "a huge one last": [(0, 0, 0, HUGE)],
}
"""Which of four micro-batches have images, in each step."""
PP, CP = {"pipeline_parallel": 2}, {"context_parallel": 2}
VPP = {**PP, "virtual_pipeline": 2}
ZERO_BUBBLE = {"pipeline": PipelineOptions(schedule="zero_bubble")}
ALONE, FIRST = {"pipeline_layout": "E|ttttL"}, {"pipeline_layout": "E|t|tt|tL"}
"""The tower is a stage by itself, or the first of four chunks."""
ALL = RecomputeOptions(granularity="full", vision=RecomputeOptions(granularity="full"))
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1F1B": (2, PP),
    "zero bubble": (2, {**PP, **ZERO_BUBBLE}),
    "interleaved": (2, VPP),
    "interleaved, zero bubble": (2, {**VPP, **ZERO_BUBBLE}),
    "tower a stage": (2, {**PP, **ALONE}),
    "tower a stage, zero bubble": (2, {**PP, **ALONE, **ZERO_BUBBLE}),
    "tower a chunk": (2, {**PP, **FIRST}),
    "tower a chunk, zero bubble": (2, {**PP, **FIRST, **ZERO_BUBBLE}),
    "recomputed, zero bubble": (2, {**PP, **ZERO_BUBBLE, "recompute": ALL}),
    "context": (2, CP),
    "context by all gather": (2, {**CP, "context": ContextOptions("all_gather")}),
    "context by all to all": (2, {**CP, "context": ContextOptions("all_to_all")}),
    "context, recomputed": (2, {**CP, "recompute": ALL}),
    "colocated, interleaved, zero bubble": (
        2,
        {**VPP, **ZERO_BUBBLE, "tower": Layout(context_parallel=2)},
    ),
    "colocated, context": (2, {**CP, "tower": Layout()}),
    "disjoint, zero bubble": (3, {**PP, **ZERO_BUBBLE, "placement": "disjoint", "tower": Layout()}),
    "disjoint, context": (3, {**CP, "placement": "disjoint", "tower": Layout()}),
    "context of four": (4, {"context_parallel": 4}),
    "1F1B and context": (4, {**PP, **CP}),
    "zero bubble and context": (4, {**PP, **ZERO_BUBBLE, **CP}),
    "tower a chunk, zero bubble, context": (4, {**PP, **FIRST, **ZERO_BUBBLE, **CP}),
    "interleaved, zero bubble, replicas": (4, {**VPP, **ZERO_BUBBLE}),
    "tower a stage, zero bubble, replicas": (4, {**PP, **ALONE, **ZERO_BUBBLE}),
    "context and replicas": (4, CP),
    "context and tensor": (4, {**CP, **SP}),
    "interleaved, zero bubble, tensor": (4, {**VPP, **ZERO_BUBBLE, **SP}),
    "disjoint, both in context": (4, {**CP, "placement": "disjoint", "tower": Layout(ranks=2, context_parallel=2)}),
}
MODELS = ("deep_qwen3", "deep", "deep_qwen")
"""With features of earlier layers that travel, images of one size, and windows."""
CHOSEN = [
    ("deep", "in the first", "tower a stage, zero bubble"),
    ("deep_qwen", "around text", "tower a chunk, zero bubble"),
    ("deep_qwen3", "in one step", "recomputed, zero bubble"),
    ("deep_qwen", "a huge one last", "context by all gather"),
    ("deep", "of one replica", "context"),
    ("deep_qwen", "in no step", "disjoint, zero bubble"),
]
FULL = [
    row
    for number, (layout, counts) in enumerate(itertools.product(LAYOUTS, ODD))
    if (row := ("deep_qwen" if "huge" in counts else MODELS[number % 3], counts, layout)) not in CHOSEN
]


@pytest.mark.parametrize("row", [*CHOSEN, *(pytest.param(each, marks=pytest.mark.full) for each in FULL)], ids=str)
def test_odd_samples_train_as_on_one_device(row: tuple[str, str, str]) -> None:
    name, counts, layout = row
    ranks, options = LAYOUTS[layout]
    found = run(_fit, ranks, name, counts, {"micro_batch_size": 1, **options}, timeout=240)
    with mock.patch.dict(COUNTS, ODD):
        expected = by_hand(name, counts)
    gradients = {key: value for rank in found for key, value in rank["gradients"].items()}
    assert gradients.keys() == expected["gradients"].keys()
    assert any("tower" in key for key in gradients)
    assert_same_gradients(gradients, expected["gradients"])
    for rank in found:
        for what in ("losses", "norms"):
            assert rank[what] == pytest.approx(expected[what], rel=1e-9)


def _fit(name: str, counts: str, options: dict[str, Any]) -> dict[str, Any]:
    with mock.patch.dict(COUNTS, ODD):
        return fit(name, counts, options)
