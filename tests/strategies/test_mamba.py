"""Hybrids with Mamba-2 under all layouts: the same losses, gradients and weights as on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megalight.models.gpt import MambaConfig
from megalight.parallel.recompute import Recompute
from tests.strategies.training import CONFIGS, assert_same_run, by_hand, fit
from tests.workers import run

HYBRID = replace(
    CONFIGS["gqa"],
    num_layers=4,
    layer_pattern="M*-M",
    mamba=MambaConfig(num_heads=8, head_dim=4, state_size=6, num_groups=2),
)
PP = {"pipeline_parallel": 2, "micro_batch_size": 1}
TP = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"recompute": Recompute(granularity="selective", modules=("*_norm", "mamba", "mlp.act"))}),
    (2, {**TP, "recompute": Recompute(granularity="full", num_layers=2)}),
    (2, {"tensor_parallel": 2}),
    (2, {"context_parallel": 2}),
    (4, {**PP, **TP, "virtual_pipeline": 2}),
]


@functools.cache
def expected() -> dict[str, Any]:
    return by_hand(HYBRID, packed=True)


def _rank(options: dict[str, Any]) -> dict[str, Any]:
    return fit(HYBRID, packed=True, **options)


@pytest.mark.parametrize(("ranks", "options"), LAYOUTS, ids=str)
def test_layout_trains_the_same_model(ranks: int, options: dict[str, Any]) -> None:
    assert_same_run(run(_rank, ranks, options)[0], expected())
