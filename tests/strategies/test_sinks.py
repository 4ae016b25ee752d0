"""A GPT with sinks, output gates and temperatures trains under every layout that serves it as on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.errors import LayoutError
from megalight.models.gpt import GPT, AttentionConfig, PositionConfig, TemperatureConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.parallel.apply import parallelize
from megalight.parallel.context.options import ContextOptions
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.recompute import Recompute
from tests.strategies.training import CONFIGS, assert_same_run, by_hand, fit
from tests.workers import run

LEARNED = replace(
    CONFIGS["gqa"], attention=AttentionConfig(softmax="learnable", window=3, window_pattern=2, qkv_bias=True)
)
ONE = replace(
    CONFIGS["gqa"],
    position=PositionConfig(pattern=(False, True)),
    attention=AttentionConfig(
        softmax="off-by-one", output_gate=True, temperature=TemperatureConfig(length=4, scale=0.5)
    ),
)
MODELS = [LEARNED, ONE]
SP = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: list[Any] = [
    (LEARNED, 2, {**SP, "recompute": Recompute(granularity="selective", modules=("core_attn",))}),
    (LEARNED, 2, {"context_parallel": 2}),
    *[
        pytest.param(*row, marks=pytest.mark.full)
        for row in [
            (ONE, 2, SP),
            (ONE, 2, {"context_parallel": 2}),
            (ONE, 2, {"context_parallel": 2, "context": ContextOptions(kind="all_gather")}),
            (LEARNED, 2, {"pipeline_parallel": 2, "micro_batch_size": 1, "recompute": Recompute(granularity="full")}),
            (LEARNED, 4, {**SP, "context_parallel": 2}),
            (LEARNED, 2, {"tensor_parallel": 2}),
        ]
    ],
]


@functools.cache
def expected(number: int) -> dict[str, Any]:
    return by_hand(MODELS[number], packed=True)


def _rank(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    return fit(config, packed=True, **options)


@pytest.mark.parametrize(("config", "ranks", "options"), LAYOUTS)
def test_layout_trains_the_same_model(config: Any, ranks: int, options: dict[str, Any]) -> None:
    assert_same_run(run(_rank, ranks, config, options)[0], expected(MODELS.index(config)))


@pytest.mark.parametrize(
    ("config", "kind", "reason"),
    [
        (ONE, "ring", "has no sinks"),
        (LEARNED, "all_to_all", "does not exchange learned sinks"),
    ],
)
def test_kinds_without_sinks_are_refused(config: Any, kind: str, reason: str) -> None:
    with torch.device("meta"):
        model = GPT(config)
    with pytest.raises(LayoutError, match=reason):
        parallelize(model, gpt_plan(model), ParallelMesh(2, 0, cp=2), context=ContextOptions(kind=kind))
