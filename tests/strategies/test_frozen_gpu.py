"""A student learns from a frozen teacher of another layout on the same GPUs, as on one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.strategies.test_frozen import SHARES, WHOLE, check
from tests.support.nccl import runs_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

ROWS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, SHARES, {}),
    (2, {"pipeline_parallel": 2}, {"tensor_parallel": 2}),
    (4, SHARES, WHOLE),
    (4, {**SHARES, "pipeline_parallel": 2}, {"tensor_parallel": 2}),
]


def jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    return [(check, (student, teacher, "cuda")) for ranks, student, teacher in ROWS if ranks == world]


@pytest.mark.parametrize(("ranks", "student", "teacher"), ROWS)
def test_a_student_learns_as_on_one_device(ranks: int, student: dict[str, Any], teacher: dict[str, Any]) -> None:
    runs_of(jobs, ranks).outcome((student, teacher, "cuda"))
