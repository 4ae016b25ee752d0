"""What is dropped does not depend on what is computed again, whatever the order of the passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megalight.models.config import DropoutConfig
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import PipelineOptions
from tests.strategies.training import CONFIGS, fit
from tests.support.workers import run

PLAIN = replace(CONFIGS["gqa"], num_layers=4)
DROPPED = replace(PLAIN, dropout=DropoutConfig(attention=0.2, hidden=0.3, embedding=0.1))
AGAIN = [
    RecomputeOptions(granularity="full", num_layers=1),
    RecomputeOptions(granularity="selective", modules=("attention_norm", "attention.inner", "mlp")),
]
ZERO_BUBBLE = {"pipeline_parallel": 2, "virtual_pipeline": 2, "pipeline": PipelineOptions(schedule="zero_bubble")}
LAYOUTS = {
    "zero bubble": (2, ZERO_BUBBLE),
    "all_to_all": (2, {"context_parallel": 2, "context": ContextOptions("all_to_all")}),
    "all_gather": (2, {"context_parallel": 2, "context": ContextOptions("all_gather")}),
    "both": (4, {**ZERO_BUBBLE, "context_parallel": 2}),
}


def runs(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Without recompute, and with each granularity; at last without dropout."""
    pairs = [(DROPPED, RecomputeOptions()), *((DROPPED, recompute) for recompute in AGAIN), (PLAIN, RecomputeOptions())]
    return [fit(config, 2, micro_batch_size=1, recompute=recompute, **options) for config, recompute in pairs]


@pytest.mark.parametrize(
    "layout",
    [name if name in ("zero bubble",) else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS],
)
def test_recompute_drops_the_same(layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    first, *again, plain = run(runs, ranks, options)[0]
    assert first["losses"][0] != plain["losses"][0]
    for found in again:
        assert found["losses"] == first["losses"]
        for name, value in first["final"].items():
            np.testing.assert_allclose(found["final"][name], value, rtol=1e-9, atol=1e-12, err_msg=name)
