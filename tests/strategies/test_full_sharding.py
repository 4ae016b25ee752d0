"""Sharded gradients and parameters train the same model as one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megalight.parallel.context.options import ContextOptions
from megalight.parallel.recompute import Recompute
from tests.strategies.training import CONFIGS, Gradients, assert_same_gradients, assert_same_run, by_hand, fit
from tests.workers import run

FULL, GRADS = "optim_grads_params", "optim_grads"


@functools.cache
def _expected(config: str, layers: int) -> dict[str, Any]:
    return by_hand(replace(CONFIGS[config], num_layers=layers))


def _trained(config: str, layers: int, level: str, options: dict[str, Any]) -> dict[str, Any]:
    gradients = Gradients()
    found = fit(
        replace(CONFIGS[config], num_layers=layers),
        options={"level": level},
        trainer_options={"precision": "64-true"},
        extra_callbacks=[gradients],
        micro_batch_size=1,
        **options,
    )
    return {**found, "gradients": gradients.first}


CASES: dict[str, tuple[int, str, int, str, dict[str, Any]]] = {
    "two layers": (2, "gqa", 2, FULL, {}),
    "tied": (2, "tied", 3, FULL, {}),
    "gradients": (2, "gpt2", 5, GRADS, {}),
    "full recompute": (2, "gqa", 4, FULL, {"recompute": Recompute(granularity="full", num_layers=1)}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(case: str) -> None:
    world, config, layers, level, options = CASES[case]
    expected = _expected(config, layers)
    for found in run(_trained, world, config, layers, level, options):
        assert_same_run(found, expected)
        assert_same_gradients(found["gradients"], expected["gradients"])
