"""Sums of gradients through slots on GPUs: every element is the sum of all ranks' terms, whatever they compute."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalight.parallel.data_parallel import reduce
from megalight.parallel.data_parallel.communication import side_stream
from megalight.parallel.data_parallel.reduce import PushedSums
from tests.support.nccl import runs_of

pytestmark = pytest.mark.gpu
LENGTHS = (1 << 10, (1 << 20) + 24, 3 << 19, 8)
"""Elements of the intervals of a run, in turn; slots hold fewer."""
RUNS = 60


def _term(rank: int, run: int, size: int) -> Tensor:
    """Return whole numbers that bfloat16 holds, so that sums in float32 are exact."""
    return ((torch.arange(size, device="cuda") * (rank + 3) + run * 17) % 251 - 125).bfloat16()


def _wrong() -> int:
    """Return the number of wrong elements on all ranks."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", rank)
    pushed, side = PushedSums(device), side_stream(device)
    assert side is not None
    with patch.object(reduce, "SLOT_BYTES", 1 << 20):
        pushed.reserve(group, 2 * max(LENGTHS))
    work = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    gradients = [torch.empty(size * max(LENGTHS), device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    shards = [torch.full((max(LENGTHS),), torch.nan, device="cuda") for _ in range(2)]
    done: list[Any] = [None, None]
    for run in range(RUNS):
        turn, length = run % 2, LENGTHS[run // 4 % len(LENGTHS)]
        if done[turn]:
            done[turn]()
        terms, shard = gradients[turn][: size * length], shards[turn][:length]
        terms.copy_(_term(rank, run, size * length))
        for _ in range((run * 5 + rank) % 4):
            work @ work
        add = run // 2 % 2 == 1  # the sums of two runs, one after the other, in each shard
        with side.after_computation():
            pushed.sum(terms, group, shard, add)
        done[turn] = side.done()
        for _ in range(run % 3):
            work @ work
        if add:
            done[turn]()
            mine = slice(rank * length, (rank + 1) * length)
            exact = sum(_term(r, n, size * length)[mine].float() for r in range(size) for n in (run - 2, run))
            wrong += (shard != exact).sum()
        if run % 9 == 8:
            time.sleep(0.002 * rank)
    dist.all_reduce(wrong)
    torch.cuda.synchronize()
    return int(wrong)


def jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    return [(_wrong, ())]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_element_is_the_sum_of_all_terms(world: int) -> None:
    assert runs_of(jobs, world).outcome(()) == 0
