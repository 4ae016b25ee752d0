"""Whole parameters that copy engines gather train the same model as one device."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel import AdvancedDataParallelOptions, DataParallelOptions, gather
from megalight.strategies import PipelineOptions
from tests.parallel.peers.shared_files import symmetric_on_cpu
from tests.strategies.test_full_sharding import _expected as _one_device
from tests.strategies.test_full_sharding import _trained as _whole
from tests.strategies.test_full_sharding_matrix import LAYOUTS, MOE, _expected, _trained
from tests.strategies.test_pushed_gathers import _counted, check_beside
from tests.strategies.training import assert_same_gradients, assert_same_run
from tests.support.cover import pairwise
from tests.support.workers import run

COVER = [
    ("dp2", "optim", 0.0),
    ("dp2", "optim", 0.5),
    ("hsdp over both", "optim", 0.0),
    ("ep edp", "optim", 0.0),
    ("dp2", "optim_grads", 0.0),
]
DIVIDED = [
    layout
    for layout, (world, _, _) in LAYOUTS.items()
    if world < 8 and layout not in ("ep", "tp", "replicas alone", "tp ep")  # a single rank has whole shards there
]
ROWS = pairwise(itertools.product(DIVIDED, ("optim", "optim_grads"), (0.0, 0.5)), COVER)


def _pushed(layout: str, level: str, share: float) -> dict[str, Any]:
    collective = gather.all_gather
    with (
        symmetric_on_cpu(),
        _counted() as done,
        patch.object(gather, "all_gather", wraps=collective) as collectives,
    ):
        found = _trained(layout, level, share, gathers="symmetric")
    assert done
    assert all(done), "parameters were gathered by a collective"
    if not LAYOUTS[layout][2].get("replicate_optimizer", True):
        assert collectives.call_count, "replicas join their parts of a shard"
    else:
        assert not collectives.call_count
    return found


@pytest.mark.parametrize(
    ("layout", "level", "share"), [pytest.param(*row, marks=[pytest.mark.full] * (row not in COVER)) for row in ROWS]
)
def test_equals_one_device(layout: str, level: str, share: float) -> None:
    world, config, _ = LAYOUTS[layout]
    expected = _expected(config, 1 if config is MOE else None)
    for found in run(_pushed, world, layout, level, share):
        assert_same_run(found, expected)
        assert_same_gradients(found["gradients"], expected["gradients"])


def _in_a_pipeline(schedule: str) -> dict[str, Any]:
    """Stages have parameters of other sizes, and ranks of other groups make their memory at other times."""
    options = {"pipeline_parallel": 2, "pipeline": PipelineOptions(schedule=schedule)}
    with symmetric_on_cpu(), _counted() as done:
        found = _whole("tied", 4, "optim", {**options, "data_parallel": {"gathers": "symmetric", "bucket_size": 2000}})
    assert done
    assert all(done)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero_bubble", marks=pytest.mark.full)])
def test_pipelines_equal_one_device(schedule: str) -> None:
    expected = _one_device("tied", 4)
    for found in run(_in_a_pipeline, 4, schedule):
        assert_same_run(found, expected)


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("average", marks=pytest.mark.full),
        pytest.param("adapters", marks=pytest.mark.full),
        pytest.param("eight bits tensorwise", marks=pytest.mark.full),
        "eight bits delayed",
    ],
)
def test_what_runs_beside_is_as_with_collectives(what: str) -> None:
    """Averaged weights in validation, frozen weights, and quantized ones, which have their own dtype in the end."""
    check_beside(what, "optim")


def _automatic() -> tuple[int, int]:
    """Return how many gathers copy engines make where they are, and where they are not."""
    counts = []
    for there in (True, False):
        with symmetric_on_cpu() if there else nullcontext(), _counted() as done:
            _trained("dp2", "optim", 0.0)
        counts.append(sum(done))
    return counts[0], counts[1]


def test_the_default_takes_copy_engines_where_they_are() -> None:
    for there, not_there in run(_automatic, 2):
        assert there
        assert not not_there


def test_a_level_that_gathers_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"gathers='symmetric' with level 'no_shard'.* use level 'optim'"):
        DataParallelOptions(level="no_shard", advanced=AdvancedDataParallelOptions(gathers="symmetric"))
