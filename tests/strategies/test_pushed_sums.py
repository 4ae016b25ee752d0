"""Gradients whose terms copy engines carry train the same model as one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel import (
    AdvancedDataParallelOptions,
    DataParallelEngine,
    DataParallelOptions,
    reduce,
)
from megalight.parallel.mesh import ParallelMesh
from tests.parallel.data_parallel.helpers import infos
from tests.parallel.peers.shared_files import symmetric_on_cpu
from tests.strategies.test_full_sharding_matrix import LAYOUTS, MOE, _expected, _trained
from tests.strategies.training import assert_same_gradients, assert_same_run
from tests.support.options import data_parallel
from tests.support.workers import run

FULL = "optim_grads_params"
COVER = {
    ("dp2", "optim"),
    ("dp2", "optim_grads"),
    ("ep edp", FULL),
}
ROWS = [
    pytest.param(layout, level, marks=() if (layout, level) in COVER else pytest.mark.full)
    for layout, (world, _, _) in LAYOUTS.items()
    for level in ("optim", "optim_grads", FULL)
    if world < 8 and layout not in ("ep", "tp", "replicas alone", "tp ep")  # a single rank has whole shards there
]


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the sums of terms from peers, which travel in several pieces; no collective may divide gradients."""
    done: list[int] = []
    summed = reduce.PushedSums.sum

    def count(self: reduce.PushedSums, terms: Tensor, group: ProcessGroup, out: Tensor, add: bool) -> None:
        summed(self, terms, group, out, add)
        done.append(out.nbytes // (self._slots[group][0].capacity // (group.size() - 1)))

    with patch.object(reduce.PushedSums, "sum", count), patch.object(reduce, "SLOT_BYTES", 3 << 10):
        yield done


def _pushed(layout: str, level: str) -> dict[str, Any]:
    gathers = "symmetric" if level == FULL else "plain"
    with symmetric_on_cpu(), _counted() as done:
        found = _trained(layout, level, 0.0, reductions="symmetric", gathers=gathers)
    assert done
    assert max(done) > 1, "no gradients traveled in pieces"
    return found


@pytest.mark.parametrize(("layout", "level"), ROWS)
def test_equals_one_device(layout: str, level: str) -> None:
    world, config, _ = LAYOUTS[layout]
    expected = _expected(config, 1 if config is MOE else None)
    for found in run(_pushed, world, layout, level):
        assert_same_run(found, expected)
        assert_same_gradients(found["gradients"], expected["gradients"])


def _collectives() -> tuple[int, int]:
    """Return how many reduce-scatters a run has with collectives, and with copy engines."""
    counts = []
    for reductions in ("plain", "symmetric"):
        with symmetric_on_cpu(), patch.object(reduce, "reduce_scatter", wraps=reduce.reduce_scatter) as collective:
            _trained("dp2", FULL, 0.0, reductions=reductions)
        counts.append(collective.call_count)
    return counts[0], counts[1]


def test_no_collective_divides_gradients() -> None:
    for plain, pushed in run(_collectives, 2):
        assert plain
        assert not pushed


def _sum(dtype: torch.dtype, out_dtype: torch.dtype, add: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of this rank, the exact one, and that of a second run."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    length = 777
    terms = [torch.randn(size * length, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
    mine = slice(rank * length, (rank + 1) * length)
    exact = torch.stack([term[mine].double() for term in terms]).sum(0)
    found = []
    with symmetric_on_cpu():
        pushed = reduce.PushedSums(torch.device("cpu"))
        with patch.object(reduce, "SLOT_BYTES", 2 << 10):
            pushed.reserve(group, length * dtype.itemsize)
        for _ in range(2):
            out = torch.full((length,), 3.0 if add else torch.nan, dtype=out_dtype)
            pushed.sum(terms[rank].clone(), group, out, add)
            found.append(out)
        # In place, as for gradients that stay whole until then.
        if dtype == out_dtype and not add:
            flat = terms[rank].clone()
            pushed.sum(flat, group, flat[mine], False)
            assert torch.equal(flat[mine], found[0])
    return found[0], exact + 3 if add else exact, found[1]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "tolerance"),
    [
        (torch.bfloat16, torch.float32, 1e-6),
        (torch.bfloat16, torch.bfloat16, 2**-8),
        (torch.float32, torch.float32, 1e-6),
        (torch.float64, torch.float64, 1e-14),
    ],
)
def test_sums_lose_no_precision(
    world: int, dtype: torch.dtype, out_dtype: torch.dtype, tolerance: float, add: bool
) -> None:
    """Terms in 16 bits are summed in float32 and rounded once; a second run gives the same bits."""
    for found, exact, again in run(_sum, world, dtype, out_dtype, add):
        assert found.dtype == out_dtype
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=4 * tolerance)
        assert torch.equal(found, again)


def _automatic() -> tuple[int, int]:
    """Return how many gradients copy engines sum where they are, and where they are not."""
    counts = []
    for there in (True, False):
        with symmetric_on_cpu() if there else nullcontext(), _counted() as done:
            _trained("dp2", FULL, 0.0, reductions="auto", gathers="auto")
        counts.append(len(done))
    return counts[0], counts[1]


def test_auto_goes_without_them_where_there_are_none() -> None:
    for there, not_there in run(_automatic, 2):
        assert there
        assert not not_there


@pytest.mark.parametrize("option", ["reductions", "gathers"])
def test_who_cannot_push_is_told(option: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=rf"{option}='symmetric': it .*Set {option}='plain'"):
        DataParallelEngine(infos(model), ParallelMesh(), data_parallel(level=FULL, **{option: "symmetric"}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DataParallelOptions(advanced=AdvancedDataParallelOptions(reductions="sideways")),
            r"reductions='sideways'; it must be one of plain, symmetric, auto",
        ),  # type: ignore[arg-type]
        (
            lambda: DataParallelOptions(advanced=AdvancedDataParallelOptions(reductions="symmetric", nccl_ub="local")),
            r"reductions='symmetric' with nccl_ub='local'",
        ),
        (
            lambda: DataParallelOptions(level="no_shard", advanced=AdvancedDataParallelOptions(reductions="symmetric")),
            r"level 'no_shard', which shards nothing",
        ),
    ],
)
def test_options_that_do_not_fit(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
