"""Experts in layouts of two, four and eight GPUs: each run equals that of one device, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.strategies.test_moe_layouts import ALONE, WIDE, expected, name_of, train
from tests.strategies.training import assert_same_run
from tests.support.nccl import runs_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

ROWS: list[tuple[dict[str, Any], int]] = [
    ({**ALONE, "ep": 2}, 4),
    ({**ALONE, "world": 4, "ep": 4}, 4),
    ({**ALONE, "world": 4, "ep": 2, "tp": 2}, 4),
    ({**ALONE, "world": 4, "ep": 2, "pipeline": "interleaved"}, 4),
    *WIDE,
]


def jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    return [(train, (layout, experts, "cuda")) for layout, experts in ROWS if layout["world"] == world]


@pytest.mark.parametrize(("layout", "experts"), ROWS, ids=[name_of(layout) for layout, _ in ROWS])
def test_the_same_run_as_on_one_device(layout: dict[str, Any], experts: int) -> None:
    found = runs_of(jobs, layout["world"]).outcome((layout, experts, "cuda"))
    assert_same_run(found, expected(experts, "cuda"))
