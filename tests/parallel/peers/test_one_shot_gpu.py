"""One-shot collectives: sums in float32 and gathered bits, in turn with other sizes and in replayed graphs."""

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


def _sum(terms: list[Tensor]) -> Tensor:
    """The sum in float32 and in the order of ranks. Of eight terms, torch's own sum adds the first and the fifth."""
    total = torch.zeros_like(terms[0], dtype=torch.float32)
    for term in terms:
        total += term.float()
    return total.to(terms[0].dtype)


def _sums(dtype: torch.dtype) -> int:
    way, wrong = one_shot(dist.group.WORLD), 0
    assert way is not None
    most = way.most // 4 * 4 // dtype.itemsize  # more ranks take fewer values
    assert not way.takes(most + 2, dtype)
    for turn in range(3):
        for size in (*(each for each in SIZES if each < most), most):
            terms = _terms(size, dtype, 100 * turn + size)
            wrong += int((way.all_reduce(terms[dist.get_rank()]) != _sum(terms)).sum())
    return wrong


def _replays(count: int) -> int:
    way, wrong = one_shot(dist.group.WORLD), 0
    assert way is not None
    x = torch.empty(2 * 4096, dtype=torch.bfloat16, device="cuda")
    way.all_reduce(x.zero_())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = way.all_reduce(way.all_reduce(x)[:4096])
    for turn in range(count):
        terms = _terms(len(x), x.dtype, turn)
        x.copy_(terms[dist.get_rank()])
        if turn % 3 == 0:
            way.all_reduce(x[:200])  # a call of fewer programs between the graph's
        graph.replay()
        first = _sum(terms)[:4096].float()
        wrong += int((y != (first * dist.get_world_size()).to(x.dtype)).sum())
    return wrong


def _experts(count: int) -> int:
    """Bring tokens and routes to all ranks, and sums back, in a graph, with all-reduces of other sizes between."""
    way, rank, ranks, wrong = one_shot(dist.group.WORLD), dist.get_rank(), dist.get_world_size(), 0
    assert way is not None
    for tokens in (1, 7, 32):
        experts = torch.empty(tokens, 6, dtype=torch.int64, device="cuda")
        probs = torch.empty(tokens, 6, device="cuda")
        hidden = torch.empty(tokens, 2048, dtype=torch.bfloat16, device="cuda")
        way.all_reduce(hidden.zero_())
        assert way.gathers(experts, probs, hidden)
        assert way.takes(hidden.numel(), hidden.dtype)
        way.reduce_scatter(way.all_gather(experts, probs, hidden)[2])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = way.all_gather(experts, probs, hidden)
            own = way.reduce_scatter(found[2] * (1 + rank))
        for turn in range(count):
            every = [torch.randint(-1, 128, (ranks * tokens, 6), device="cuda"), torch.rand(ranks * tokens, 6).cuda()]
            every += [torch.randn(ranks * tokens, 2048).bfloat16().cuda()]
            for each in every:
                dist.broadcast(each, 0)
            for each, whole in zip((experts, probs, hidden), every, strict=True):
                each.copy_(whole[rank * tokens :][:tokens])
            if turn % 3 == 0:
                way.all_reduce(hidden[:1, :200].contiguous())
            graph.replay()
            wrong += sum(int((one != two).sum()) for one, two in zip(found, every, strict=True))
            sums = _sum([every[2] * (1 + each) for each in range(ranks)])
            wrong += int((own != sums[rank * tokens :][:tokens]).sum())
    return wrong


def _jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    return [
        *((_sums, (dtype,)) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        (_replays, (500,)),
        (_experts, (60,)),
    ]


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("job", range(5))
def test_every_value_is_right(world: int, job: int) -> None:
    assert runs_of(_jobs, world).outcome(_jobs(world)[job][1]) == 0
