from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from megalight.errors import ConfigurationError
from megalight.optim import WSD, Constant, CosineDecay, InverseSqrtDecay, LinearDecay, LRSchedule

ROOT = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (Constant(warmup=2), {0: 0.5, 1: 1.0, 2: 1.0, 1000: 1.0}),
        (Constant(), {0: 1.0}),
        (
            CosineDecay(warmup=2, steps=10, min_ratio=0.1),
            {0: 0.5, 1: 1.0, 2: 1.0, 4: 0.1 + 0.45 * (1 + ROOT), 6: 0.55, 10: 0.1, 11: 0.1},
        ),
        (LinearDecay(warmup=4, steps=12), {0: 0.25, 3: 1.0, 4: 1.0, 6: 0.75, 11: 0.125, 12: 0.0, 99: 0.0}),
        (LinearDecay(steps=10, min_ratio=0.5), {0: 1.0, 5: 0.75, 10: 0.5}),
        (WSD(warmup=2, steps=20, decay=0.2), {1: 1.0, 16: 1.0, 17: 0.5, 18: 1 - ROOT, 20: 0.0, 30: 0.0}),
        (WSD(steps=20, decay=0.2, shape="linear", min_ratio=0.2), {16: 1.0, 18: 0.6, 20: 0.2}),
        (WSD(steps=20, decay=0.2, shape="cosine"), {17: 0.5 * (1 + ROOT), 18: 0.5, 20: 0.0}),
        (WSD(warmup=5, steps=10, decay=1.0, shape="linear"), {4: 1.0, 5: 1.0, 6: 0.8, 10: 0.0}),
        (InverseSqrtDecay(warmup=4), {0: 0.25, 3: 1.0, 4: 1.0, 8: ROOT, 12: math.sqrt(1 / 3), 64: 0.25}),
        (InverseSqrtDecay(min_ratio=0.5), {0: 1.0, 1: ROOT, 3: 0.5, 100: 0.5}),
    ],
)
def test_golden_factors(schedule: LRSchedule, factors: dict[int, float]) -> None:
    assert {step: schedule.factor(step) for step in factors} == pytest.approx(factors, abs=1e-12)


def test_the_scheduler_scales_every_group() -> None:
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 1.0}])
    scheduler = LinearDecay(warmup=2, steps=4).build(optimizer)
    rates = []
    for _ in range(5):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert [rate for _, rate in rates] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    assert [rate for rate, _ in rates] == pytest.approx([0.05, 0.1, 0.1, 0.05, 0.0])
    assert CosineDecay(steps=7).build(optimizer).state_dict()["lr_lambdas"] == [None, None]  # the recipe's word holds


def test_length_comes_from_the_run_where_none_is_stated() -> None:
    assert CosineDecay(warmup=2).for_run(10) == CosineDecay(warmup=2, steps=10)
    assert CosineDecay(steps=5).for_run(10).steps == 5
    # A run that ends within the warm-up begins like a long one.
    short, long = (CosineDecay(warmup=8).for_run(steps) for steps in (4, 800))
    assert (
        [short.factor(step) for step in range(4)]
        == [long.factor(step) for step in range(4)]
        == [0.125, 0.25, 0.375, 0.5]
    )
    with pytest.raises(
        ConfigurationError, match="CosineDecay needs the length of the run; set max_steps of the trainer"
    ):
        CosineDecay().for_run(-1).factor(0)
    assert Constant().for_run(-1).factor(3) == 1.0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (CosineDecay, {"warmup": 10, "steps": 10}, "10 steps and warmup is 10"),
        (Constant, {"warmup": -1}, "at least 0"),
        (LinearDecay, {"min_ratio": 1.5}, "min_ratio is 1.5"),
        (InverseSqrtDecay, {"min_ratio": -0.1}, "min_ratio is -0.1"),
        (WSD, {"decay": 0.0}, "decay is 0.0"),
        (WSD, {"shape": "cubic"}, "shape is 'cubic'; use linear, cosine or sqrt"),
    ],
)
def test_impossible_schedules_are_refused(kind: type[LRSchedule], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        kind(**options)
