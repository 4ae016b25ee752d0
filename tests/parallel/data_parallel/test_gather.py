from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.parallel.data_parallel import DataParallelEngine
from tests.parallel.data_parallel.helpers import accumulate, assert_close, batches, build, infos, loss, mesh
from tests.workers import run


def _hooks_wait_for_their_own_parameters() -> None:
    model, reference = build(), build()
    engine = DataParallelEngine(infos(model), mesh(), bucket_size=1)
    engine.attach_gather_hooks(model)
    for shard in engine.shards:
        shard.master.data.mul_(2)
    for p in reference.parameters():
        p.data.mul_(2)
    engine.publish()
    waiting = engine._parameters._gatherer._waits
    assert len(waiting) == len(engine.buckets)
    x = batches(0, 1, 1)[0, 0]
    with engine.micro_batches(1, reduce=False):  # leaves the waiting to the modules
        assert len(waiting) == len(engine.buckets)
        hidden = model[0](x)
        assert len(waiting) == len(engine.buckets) - 2
        assert_close(hidden, reference[0](x))
        assert_close(loss(model, x), loss(reference, x))
    assert not waiting


def test_hooks_wait_for_their_own_parameters() -> None:
    run(_hooks_wait_for_their_own_parameters, 2)


class ReadsItsChild(nn.Module):
    """Uses a child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.output = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.output.weight.T


def _parents_wait_for_childless_children() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 5)), ReadsItsChild()).double()
    engine = DataParallelEngine(infos(model), mesh(), bucket_size=1)
    engine.attach_gather_hooks(model)
    engine.publish()
    waiting = engine._parameters._gatherer._waits
    hidden = model[0](torch.ones(2, 5).double())
    assert len(waiting) == 4
    model[1](hidden)
    assert not waiting


def test_parents_wait_for_childless_children() -> None:
    run(_parents_wait_for_childless_children, 2)


def _without_hooks(overlap: bool) -> None:
    model = build()
    engine = DataParallelEngine(infos(model), mesh(), bucket_size=30, overlap_param_gather=overlap)
    waiting = engine._parameters._gatherer._waits
    for shard in engine.shards:
        shard.master.data.fill_(1 + dist.get_rank())
    engine.publish()
    assert bool(waiting) == overlap
    with engine.micro_batches(1):
        assert not waiting
    world = dist.get_world_size()
    for bucket in engine.buckets:
        assert torch.equal(bucket.params.view(world, -1).mean(1), torch.arange(1, world + 1).double())
    accumulate(engine, model, batches(0, 1, 1)[0])
    engine.publish()
    engine.finish_grad_sync()
    assert not waiting  # the optimizer may write now


@pytest.mark.parametrize("overlap", [True, False])
def test_micro_batches_wait_where_modules_do_not(overlap: bool) -> None:
    run(_without_hooks, 4, overlap)
