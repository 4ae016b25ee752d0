"""A GPT with convolutions in some layers trains under every layout that serves it as on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.errors import LayoutError
from megalight.models.gpt import GPT
from megalight.models.gpt.plan import gpt_plan
from megalight.parallel.apply import parallelize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.recompute import RecomputeOptions
from tests.strategies.training import CONFIGS, assert_same_run, by_hand, fit
from tests.support.workers import run

HYBRID = replace(CONFIGS["gqa"], num_layers=4, mixer_pattern=("conv", "attention", "conv"), conv_kernel=4)
PP = {"pipeline_parallel": 2, "micro_batch_size": 1}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"recompute": RecomputeOptions(granularity="selective", modules=("*_norm", "conv", "mlp.act"))}),
    (
        2,
        {
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "recompute": RecomputeOptions(granularity="full", num_layers=2),
        },
    ),
    pytest.param(2, PP, marks=pytest.mark.full),
    pytest.param(4, {**PP, "tensor_parallel": 2, "virtual_pipeline": 2}, marks=pytest.mark.full),
]


@functools.cache
def expected() -> dict[str, Any]:
    return by_hand(HYBRID, packed=True)


def _rank(options: dict[str, Any]) -> dict[str, Any]:
    return fit(HYBRID, packed=True, **options)


@pytest.mark.parametrize(("ranks", "options"), LAYOUTS, ids=str)
def test_layout_trains_the_same_model(ranks: int, options: dict[str, Any]) -> None:
    assert_same_run(run(_rank, ranks, options)[0], expected())


def test_context_parallelism_is_refused() -> None:
    with torch.device("meta"):
        model = GPT(HYBRID)
    with pytest.raises(LayoutError, match=r"layers\.0\.conv \(ShortConv\) needs whole sequences, and cp=2"):
        parallelize(model, gpt_plan(model), ParallelMesh(2, 0, cp=2))
