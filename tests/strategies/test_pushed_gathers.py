"""Units whose parameters copy engines gather train the same model as one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel import AdvancedDataParallelOptions, DataParallelOptions
from megalight.parallel.data_parallel import gather as pushes
from megalight.parallel.data_parallel.buffers import FlatParameters
from megalight.strategies import PipelineOptions
from tests.parallel.peers.shared_files import symmetric_on_cpu
from tests.strategies.test_full_sharding import CASES, FULL, _beside, _expected, _trained
from tests.strategies.training import assert_same_gradients, assert_same_run
from tests.support.workers import run

NAMES = ("two layers", "tied", "three ranks", "whole gradients", "host", "full recompute", "tp", "hybrid")
MORE: dict[str, tuple[int, str, int, str, dict[str, Any]]] = {
    "no prefetch": (2, "gqa", 3, FULL, {"data_parallel": {"prefetch": 0}}),
    "pipeline": (4, "gqa", 4, FULL, {"pipeline_parallel": 2}),
    "zero bubble": (4, "gqa", 4, FULL, {"pipeline_parallel": 2, "pipeline": PipelineOptions(schedule="zero_bubble")}),
}
SELECTED = {name: CASES[name] for name in NAMES} | MORE
WHOLE = ("zero bubble", "whole gradients", "full recompute", "two layers", "tp", "three ranks", "tied")
"""Only whole runs have these: test_full_sharding.py and other cases have their parts."""


@contextmanager
def _counted() -> Any:
    """Count the gathers that go through buffers of peers."""
    done: list[bool] = []
    gather = pushes.Pushes.gather

    def count(self: pushes.Pushes, bucket: FlatParameters) -> bool:
        done.append(gather(self, bucket))
        return done[-1]

    pushes.Pushes.gather = count  # type: ignore[method-assign]
    try:
        yield done
    finally:
        pushes.Pushes.gather = gather  # type: ignore[method-assign]


def _pushed(config: str, layers: int, level: str, options: dict[str, Any]) -> dict[str, Any]:
    given = {**options, "data_parallel": {**options.get("data_parallel", {}), "gathers": "symmetric"}}
    with symmetric_on_cpu(), _counted() as done:
        found = _trained(config, layers, level, given)
    assert done
    assert all(done), "a unit was gathered by a collective"
    return found


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.full if case in WHOLE else ()) for case in SELECTED]
)
def test_equals_one_device(case: str) -> None:
    world, config, layers, level, options = SELECTED[case]
    expected = _expected(config, layers)
    for found in run(_pushed, world, config, layers, level, options):
        assert_same_run(found, expected)
        assert_same_gradients(found["gradients"], expected["gradients"])


def _both_ways(what: str, level: str) -> list[dict[str, Any]]:
    with symmetric_on_cpu(), _counted() as done:
        pushed = _beside(what, level, gathers="symmetric")
    assert any(done)
    return [_beside(what, level), pushed]


def check_beside(what: str, level: str) -> None:
    """Check that a run with something beside it is the same by copy engines and by collectives."""
    for plain, pushed in run(_both_ways, 2, what, level):
        np.testing.assert_array_equal(pushed["losses"], plain["losses"])
        assert pushed["metrics"].items() >= {k: v for k, v in plain["metrics"].items() if k.endswith("loss")}.items()
        for name, value in plain["final"].items():
            np.testing.assert_array_equal(pushed["final"][name], value, err_msg=name)


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("average", marks=pytest.mark.full),
        "adapters",
        pytest.param("eight bits tensorwise", marks=pytest.mark.full),
    ],
)
def test_what_runs_beside_is_as_with_collectives(what: str) -> None:
    """Averaged weights in validation, frozen weights, and 8-bit products."""
    check_beside(what, FULL)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DataParallelOptions(advanced=AdvancedDataParallelOptions(gathers="sideways")),
            r"gathers='sideways'; it must be one of plain, symmetric, auto",
        ),  # type: ignore[arg-type]
        (
            lambda: DataParallelOptions(advanced=AdvancedDataParallelOptions(gathers="symmetric", nccl_ub="local")),
            r"gathers='symmetric' with nccl_ub='local'",
        ),
    ],
)
def test_options_that_do_not_fit(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
