from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.optim import Adam
from megalight.optim.sharded import shard_optimizer
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, gather
from tests.parallel.data_parallel.helpers import accumulate, assert_close, batches, build, infos, loss, mesh
from tests.support.workers import run


def _hooks_wait_for_their_own_parameters() -> None:
    model, reference = build(), build()
    engine = DataParallelEngine(infos(model), mesh(), DataParallelOptions(bucket_size=1))
    engine.parameters.attach_gather_hooks(model)
    for shard in engine.shards:
        shard.master.data.mul_(2)
    for p in reference.parameters():
        p.data.mul_(2)
    engine.publish()
    waiting = engine.parameters.gatherer._waits
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
    engine = DataParallelEngine(infos(model), mesh(), DataParallelOptions(bucket_size=1))
    engine.parameters.attach_gather_hooks(model)
    engine.publish()
    waiting = engine.parameters.gatherer._waits
    hidden = model[0](torch.ones(2, 5).double())
    assert len(waiting) == 4
    model[1](hidden)
    assert not waiting


def test_parents_wait_for_childless_children() -> None:
    run(_parents_wait_for_childless_children, 2)


def _an_ended_run_is_freed() -> None:
    model = build()
    engine = DataParallelEngine(infos(model), mesh(), DataParallelOptions(bucket_size=1))
    engine.parameters.attach_gather_hooks(model)
    accumulate(engine, model, batches(0, 1, 1)[0])
    engine.publish()
    masters = [weakref.ref(bucket) for bucket in engine.buckets]
    engine.close()
    assert not any(part._forward_pre_hooks for part in model.modules())
    del engine
    gc.collect()
    assert [bucket() for bucket in masters] == [None] * len(masters)


def test_modules_keep_nothing_of_an_ended_run() -> None:
    run(_an_ended_run_is_freed, 2)


def _without_hooks(overlap: bool) -> None:
    model = build()
    engine = DataParallelEngine(infos(model), mesh(), DataParallelOptions(bucket_size=30, overlap_param_gather=overlap))
    waiting = engine.parameters.gatherer._waits
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


def _travel_under_the_update(dtype: torch.dtype) -> None:
    """Two groups, as for weight decay: the norm and biases are in the second, but the forward pass needs them early."""
    model, reference = build(dtype), build(dtype)
    groups = {name: int(p.dim() == 1) for name, p in model.named_parameters()}
    engine = DataParallelEngine(infos(model, groups.__getitem__), mesh(), DataParallelOptions(bucket_size=1))
    engine.parameters.attach_gather_hooks(model)
    optimizer, whole = (Adam(_in_groups(each, groups), lr=1e-2) for each in (model, reference))
    shard_optimizer(optimizer, engine)

    log: list[str] = []
    update, start = optimizer._update, gather.gather
    names = {id(b.shard.master): b.infos[0].name for b in engine.buckets}
    optimizer._update = lambda p, group: (log.append(f"update {names[id(p)]}"), update(p, group))[1]  # type: ignore[method-assign,assignment,func-returns-value]
    sent = {b.params.data_ptr(): b.infos[0].name for b in engine.buckets}
    gather.gather = lambda into, own, group: (log.append(f"send {sent[into.data_ptr()]}"), start(into, own, group))[1]  # type: ignore[func-returns-value]
    try:
        for step in range(3):
            inputs = batches(step, dist.get_world_size(), 2, dtype)
            accumulate(engine, model, inputs[dist.get_rank()])
            log.clear()
            optimizer.step()
            forward = [f"{way} {name}" for name in dict(model.named_parameters()) for way in ("update", "send")]
            assert log == forward, "each is sent behind its update, and first what the forward pass needs first"
            engine.publish()
            assert log == forward, "nothing is sent twice"
            for rows in inputs.flatten(0, 1):
                loss(reference, rows).backward()
            whole.step()
            whole.zero_grad()
    finally:
        gather.gather = start
    engine.sync_parameters()
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(own, expected, 1e-9 if dtype == torch.float64 else 2e-2)
    for bucket in engine.buckets:
        assert torch.equal(bucket.own_params, bucket.shard.master.to(dtype))


def _in_groups(model: nn.Module, groups: dict[str, int]) -> list[dict[str, object]]:
    params = [[p for name, p in model.named_parameters() if groups[name] == number] for number in (0, 1)]
    return [{"params": params[0], "weight_decay": 0.5}, {"params": params[1]}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_travel_under_the_update_of_others(dtype: torch.dtype) -> None:
    run(_travel_under_the_update, 2, dtype)


def _an_update_that_fails_is_published_anew() -> None:
    model = build(torch.bfloat16)
    engine = DataParallelEngine(infos(model), mesh(), DataParallelOptions(bucket_size=1))
    optimizer = shard_optimizer(Adam(model.parameters(), lr=0.1), engine)
    accumulate(engine, model, batches(0, 1, 1, torch.bfloat16)[0])
    update, count = optimizer._update, 0

    def fails(parameter: Tensor, group: dict[str, object]) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise RuntimeError("no more")
        update(parameter, group)

    optimizer._update = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no more"):
        optimizer.step()
    assert len(engine.parameters.gatherer._waits) == 3, "those that were updated are on their way"
    for flat in engine.shards:
        flat.master.data.fill_(1 + dist.get_rank())  # a checkpoint is loaded, say
    engine.publish()
    engine.sync_parameters()
    world = dist.get_world_size()
    for bucket in engine.buckets:
        assert torch.equal(bucket.params.view(world, -1).float().mean(1), torch.arange(1.0, world + 1))


def test_an_update_that_fails_is_published_anew() -> None:
    run(_an_update_that_fails_is_published_anew, 2)
