"""A GPT with sinks, output gates and temperatures trains under every layout that serves it as on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megalight.models.gpt import AttentionConfig, PositionConfig, TemperatureConfig
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.recompute import RecomputeOptions
from tests.strategies.training import CONFIGS, assert_same_run, by_hand, fit
from tests.support.workers import run

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
WHOLE = replace(LEARNED, attention=AttentionConfig(softmax="learnable", qkv_bias=True))  # the ring has no windows
MODELS = [LEARNED, ONE, WHOLE]
SP = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: list[Any] = [
    (LEARNED, 2, {**SP, "recompute": RecomputeOptions(granularity="selective", modules=("core_attn",))}),
    (LEARNED, 2, {"context_parallel": 2}),
    (WHOLE, 2, {"context_parallel": 2, "context": ContextOptions(kind="ring")}),
    *[
        pytest.param(*row, marks=pytest.mark.full)
        for row in [
            (ONE, 2, SP),
            (ONE, 2, {"context_parallel": 2}),
            (ONE, 2, {"context_parallel": 2, "context": ContextOptions(kind="all_gather")}),
            (
                LEARNED,
                2,
                {"pipeline_parallel": 2, "micro_batch_size": 1, "recompute": RecomputeOptions(granularity="full")},
            ),
            (LEARNED, 4, {**SP, "context_parallel": 2}),
            (LEARNED, 2, {"context_parallel": 2, "context": ContextOptions(kind="all_gather")}),
            (ONE, 2, {"context_parallel": 2, "context": ContextOptions(kind="ring")}),
            (WHOLE, 4, {**SP, "context_parallel": 2, "context": ContextOptions(kind="ring")}),
            (WHOLE, 4, {"context_parallel": 4, "context": ContextOptions(kind="all_to_all_ring", inner=2)}),
            (ONE, 4, {"context_parallel": 4, "context": ContextOptions(kind="all_to_all_ring", inner=2)}),
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
