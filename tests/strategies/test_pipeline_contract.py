"""A user's own module under a pipeline: side outputs, shared weights, metrics, predictions, odd numbers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.strategies.toy import ToyModule, fit
from tests.support.workers import run


def _toy(layers: int, rows: int, options: dict[str, Any]) -> dict[str, Any]:
    return fit(ToyModule(layers, rows), **options)


@functools.cache
def alone(layers: int, rows: int) -> dict[str, Any]:
    (found,) = run(_toy, 1, layers, rows, {})
    return dict(found)


ROWS = [
    (2, 4, 6, {"pipeline_parallel": 2}),
    pytest.param(3, 3, 1, {"pipeline_parallel": 3}, marks=pytest.mark.full),  # fewer micro-batches than ranks
    pytest.param(
        4, 8, 7, {"pipeline_parallel": 4, "virtual_pipeline": 2}, marks=pytest.mark.full
    ),  # a smaller last group
    pytest.param(4, 4, 6, {"pipeline_parallel": 2}, marks=pytest.mark.full),  # two replicas
    (4, 2, 5, {"pipeline_parallel": 4, "pipeline_layout": "E|t||tL"}),  # a stage that hands on what it gets
]


@pytest.mark.parametrize(("world", "layers", "rows", "options"), ROWS, ids=lambda value: str(value))
def test_side_outputs_travel_and_come_back(world: int, layers: int, rows: int, options: dict[str, Any]) -> None:
    found, expected = run(_toy, world, layers, rows, options), alone(layers, rows)
    replicas = world // options["pipeline_parallel"]
    for rank, one in enumerate(found):
        for step, reference in zip(one["steps"], expected["steps"], strict=True):
            assert step.keys() == reference.keys()
            for name in reference:
                assert step[name] == pytest.approx(reference[name], rel=1e-9), name
        assert one["final"] == pytest.approx(expected["final"], rel=1e-9)
        share = [np.array(rows)[rank % replicas :: replicas] for rows in expected["predicted"]]
        for mine, reference in zip(one["predicted"], share, strict=True):
            np.testing.assert_allclose(mine, reference, rtol=1e-9)
