"""The one-shot all-reduce: a sum in float32 on every rank, in turn with other sizes and in replayed graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalight.parallel.peers.one_shot import WORDS, one_shot
from tests.support.nccl import runs_of

pytestmark = pytest.mark.gpu
SIZES = (2, 6, 2 * WORDS, 2 * WORDS + 2, 5120, 3 * 4096 + 10, 64 * 5120)


def _terms(size: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    random = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(size, device="cuda", generator=random).to(dtype) for _ in range(dist.get_world_size())]


def _sums(dtype: torch.dtype) -> int:
    way, wrong = one_shot(dist.group.WORLD), 0
    assert way is not None
    for turn in range(3):
        for size in SIZES:
            terms = _terms(size, dtype, 100 * turn + size)
            got = way(terms[dist.get_rank()])
            wanted = torch.stack([each.float() for each in terms]).sum(0).to(dtype)
            wrong += int((got != wanted).sum())
    return wrong


def _replays(count: int) -> int:
    way, wrong = one_shot(dist.group.WORLD), 0
    assert way is not None
    x = torch.empty(2 * 4096, dtype=torch.bfloat16, device="cuda")
    way(x.zero_())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = way(way(x)[:4096])
    for turn in range(count):
        terms = _terms(len(x), x.dtype, turn)
        x.copy_(terms[dist.get_rank()])
        if turn % 3 == 0:
            way(x[:200])  # a call of fewer programs between the graph's
        graph.replay()
        first = torch.stack([each.float() for each in terms]).sum(0).to(x.dtype)[:4096].float()
        wrong += int((y != (first * dist.get_world_size()).to(x.dtype)).sum())
    return wrong


def _jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    return [*((_sums, (dtype,)) for dtype in (torch.bfloat16, torch.float16, torch.float32)), (_replays, (500,))]


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("job", range(4))
def test_every_value_is_that_of_a_sum_in_float32(world: int, job: int) -> None:
    assert runs_of(_jobs, world).outcome(_jobs(world)[job][1]) == 0
