"""A run whose activations go to host memory equals one whose activations stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from megalight.callbacks import ActivationOffload, CUDAGraph
from megalight.errors import ConfigurationError
from megalight.parallel.recompute import RecomputeOptions
from tests.strategies.training import CONFIGS, assert_same_run, by_hand, fit
from tests.support.workers import run

CONFIG = replace(CONFIGS["gqa"], num_layers=4)
ONE_SIDED = "E|t*4L"


def _fit(options: dict[str, Any]) -> dict[str, Any]:
    offload = ActivationOffload(["attention", "mlp*"], 1)
    found = fit(CONFIG, extra_callbacks=[offload], micro_batch_size=1, **options)
    empty = options.get("pipeline_layout") == ONE_SIDED and dist.get_rank() == 0
    assert (offload.moved > 0) != empty
    assert (0 < offload.pinned < offload.moved) != empty, "steps use the memory of those before"
    return found


def _all() -> list[dict[str, Any]]:
    norms = RecomputeOptions(granularity="selective", modules=("attention_norm", "mlp_norm", "mlp.act"))
    ways: list[dict[str, Any]] = [
        {"options": {"level": "optim_grads_params"}, "recompute": norms},
        {"pipeline_parallel": 2},
        {"pipeline_parallel": 2, "pipeline_layout": ONE_SIDED},
        {"tensor_parallel": 2, "sequence_parallel": True},
    ]
    return [_fit(way) for way in ways]


def test_equals_one_device() -> None:
    """Beside sharded weights, recompute, pipelines (one with a stage without layers), and split layers."""
    expected = by_hand(CONFIG)
    for ranks in run(_all, 2):
        for found in ranks:
            assert_same_run(found, expected)


def _refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"pattern 'atention' of ActivationOffload .* Did you mean 'attention'"
    ):
        fit(CONFIG, extra_callbacks=[ActivationOffload(["atention"])])
    with pytest.raises(ConfigurationError, match="names only modules of the last layer"):
        fit(replace(CONFIG, num_layers=1), extra_callbacks=[ActivationOffload(["mlp"])])
    with pytest.raises(ConfigurationError, match="ActivationOffload with CUDAGraph"):
        fit(CONFIG, extra_callbacks=[ActivationOffload(["mlp"]), CUDAGraph(on_refusal="eager")])


def test_what_cannot_be_moved_is_refused() -> None:
    run(_refused, 1)
    with pytest.raises(ConfigurationError, match=r"ActivationOffload\(modules=\[\], min_elements=1048576\)"):
        ActivationOffload([])
