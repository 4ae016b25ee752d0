"""Norms over all query heads, and over all key heads, where ranks divide heads: the same run as on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megalight.models.gpt import AttentionConfig, GPTConfig, NormConfig
from megalight.parallel.recompute import RecomputeOptions
from tests.strategies.training import (
    CONFIGS,
    Gradients,
    assert_same_gradients,
    assert_same_run,
    by_hand,
    fit,
)
from tests.support.workers import run

WHOLE = AttentionConfig(qk_norm=True, qk_norm_whole=True)
MODELS = {
    "mha": replace(CONFIGS["mha"], attention=WHOLE),
    "gqa": replace(CONFIGS["gqa"], attention=WHOLE),
    "mqa": replace(CONFIGS["gqa"], num_kv_heads=1, attention=WHOLE, norm=NormConfig(around_zero=True)),
}
TP = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: list[Any] = [
    ("mha", 2, {"tensor_parallel": 2}),
    ("mqa", 2, {**TP, "recompute": RecomputeOptions(granularity="selective", modules=("attention",))}),
    ("gqa", 4, {"tensor_parallel": 4, "sequence_parallel": True}),  # key heads on two ranks each
    *[
        pytest.param(*row, marks=pytest.mark.full)
        for row in [
            ("mha", 4, {"tensor_parallel": 4}),
            ("gqa", 2, TP),
            ("gqa", 2, {"context_parallel": 2}),
            ("gqa", 4, {**TP, "context_parallel": 2}),
            ("mqa", 4, {**TP, "pipeline_parallel": 2, "micro_batch_size": 1}),
            ("mqa", 4, {"tensor_parallel": 4}),
        ]
    ],
]


@functools.cache
def expected(name: str) -> dict[str, Any]:
    return by_hand(MODELS[name], packed=True)


def _rank(config: GPTConfig, options: dict[str, Any]) -> dict[str, Any]:
    gradients = Gradients()
    return {**fit(config, packed=True, extra_callbacks=[gradients], **options), "gradients": gradients.first}


@pytest.mark.parametrize(("name", "ranks", "options"), LAYOUTS, ids=str)
def test_layout_trains_the_same_model(name: str, ranks: int, options: dict[str, Any]) -> None:
    found, wanted = run(_rank, ranks, MODELS[name], options)[0], expected(name)
    assert_same_run(found, wanted)
    assert_same_gradients(found["gradients"], wanted["gradients"])
