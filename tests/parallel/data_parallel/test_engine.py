from __future__ import annotations

import copy
import gc
import weakref
from contextlib import suppress
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError, MegalightError
from megalight.ops.parameter import add_gradient
from megalight.parallel.data_parallel import (
    AdvancedDataParallelOptions,
    DataParallelEngine,
    DataParallelOptions,
    ParamInfo,
)
from megalight.parallel.data_parallel import engine as engine_module
from megalight.parallel.data_parallel import reduce as reduce_module
from megalight.parallel.mesh import ParallelMesh, new_group
from megalight.parallel.shard import ShardSpec
from tests.parallel.data_parallel.helpers import (
    accumulate,
    assert_close,
    assert_models_close,
    batches,
    build,
    infos,
    loss,
    mesh,
)
from tests.support.workers import run


def _edges_and_limits() -> list[int]:
    """Elements of the buckets as they are sent, with small ones at the edge, through a group with a limit."""
    asked: list[tuple[tuple[int, ...], int | None]] = []
    made: list[dist.ProcessGroup] = []

    def group(ranks: tuple[int, ...], purpose: str, max_ctas: int | None = None) -> dist.ProcessGroup:
        asked.append((tuple(ranks), max_ctas))
        made.append(new_group(ranks, purpose))
        return made[-1]

    model, reference = build(), build()
    with patch.object(engine_module, "new_group", group), patch.object(dist, "get_backend", lambda: "nccl"):
        engine = DataParallelEngine(
            infos(model),
            mesh(),
            DataParallelOptions(bucket_size=60, advanced=AdvancedDataParallelOptions(edge_bucket_size=8, max_ctas=3)),
        )
    assert asked == [((0, 1), 3)]
    inputs = batches(0, 2, 1)
    sent: list[int] = []

    def reduce(out: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work:
        assert group is made[0]
        sent.append(x.numel())
        return before(out, x, group=group, async_op=async_op)

    before = reduce_module.reduce_scatter
    with patch.object(reduce_module, "reduce_scatter", reduce):
        accumulate(engine, model, inputs[dist.get_rank()])
    loss(reference, inputs).backward()
    gradients = [p.grad for p in reference.parameters() if p.grad is not None]
    assert_close(engine.grad_norm(), torch.stack([g.norm() for g in gradients]).norm())
    assert sent == [bucket.layout.numel for bucket in engine.buckets]
    return [sum(slot.numel for slot in bucket.layout.slots) for bucket in engine.buckets]


def test_small_buckets_at_the_edge_and_a_limit_on_sms() -> None:
    """Weights of 35, 7, 7, 7, 21 and 3 elements, last first: 80 in all, 56 of them at the edge."""
    assert run(_edges_and_limits, 2) == [[24, 14, 42]] * 2


def _limited_without_nccl() -> None:
    with pytest.raises(ConfigurationError, match=r"^max_ctas=3 limits.*the backend here is gloo\. Remove it"):
        DataParallelEngine(
            infos(build()), mesh(), DataParallelOptions(advanced=AdvancedDataParallelOptions(max_ctas=3))
        )


def test_a_limit_on_sms_needs_nccl() -> None:
    run(_limited_without_nccl, 2)


def _communicators_of_its_own() -> None:
    for sizes in ({}, {"cp": 2}, {"tp": 2}):
        place = mesh(**sizes)
        first, second = (DataParallelEngine(infos(build()), place) for _ in range(2))
        others = {id(place.group(*axes)) for axes in (("dp",), ("cp",), ("tp",), ("dp", "cp"), ("pp", "dp", "cp"))}
        used = {id(group) for b in first.buckets for group in (b.group, b.shard_group) if group is not None}
        assert used, sizes
        assert not used & {*others, id(dist.group.WORLD)}, "buckets would delay counts, and keys of other ranks"
        assert all(id(bucket.group) in used for bucket in second.buckets), "a second engine needs no further ones"


def test_nothing_else_queues_behind_buckets() -> None:
    run(_communicators_of_its_own, 4)


def _trains_like_one_process(level: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for overlap, micro in product((True, False), (1, 3)):
        model, reference = build(), build()
        engine = DataParallelEngine(
            infos(model),
            mesh(),
            DataParallelOptions(level=level, bucket_size=30, overlap_grad_reduce=overlap, overlap_param_gather=overlap),
        )
        assert len(engine.buckets) > 2
        optimizer = torch.optim.AdamW([shard.master for shard in engine.shards], lr=0.05)
        expected = torch.optim.AdamW(reference.parameters(), lr=0.05)
        for step in range(3):
            inputs = batches(step, world, micro)
            expected.zero_grad()
            loss(reference, inputs).backward()
            accumulate(engine, model, inputs[rank])
            gradients = [p.grad for p in reference.parameters() if p.grad is not None]
            assert_close(engine.grad_norm(), torch.stack([g.norm() for g in gradients]).norm())
            if level == "no_shard":
                for p, gradient in zip(model.parameters(), gradients, strict=True):
                    assert p.grad is p.main_grad
                    assert_close(p.grad, gradient)
            optimizer.step()
            engine.publish()
            expected.step()
        engine.sync_parameters()
        assert_models_close(model, reference)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full), 4])
@pytest.mark.parametrize("level", ["no_shard", "optim"])
def test_trains_like_one_process(level: str, world: int) -> None:
    run(_trains_like_one_process, world, level)


def _half_parameters(level: str, name: str) -> None:
    """Against a loop written out by hand: fp32 masters, gradients added up in this dtype, SGD on the masters."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model, reference = build(torch.bfloat16), build(torch.bfloat16)
    engine = DataParallelEngine(
        infos(model), mesh(), DataParallelOptions(level=level, bucket_size=30, gradient_dtype=name)
    )
    grad_dtype = getattr(torch, name)
    assert all(shard.master.dtype == torch.float32 for shard in engine.shards)
    optimizer = torch.optim.SGD([shard.master for shard in engine.shards], lr=0.01)
    masters = [p.detach().float() for p in reference.parameters()]
    for step in range(3):
        inputs = batches(step, world, 2, torch.bfloat16)
        accumulate(engine, model, inputs[rank])
        optimizer.step()
        engine.publish()
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in masters]
        for of_rank in inputs:
            own = [torch.zeros_like(p, dtype=grad_dtype) for p in masters]
            for x in of_rank:
                gradients = torch.autograd.grad(loss(reference, x), list(reference.parameters()))
                for total, gradient in zip(own, gradients, strict=True):
                    total += gradient
            for total, part in zip(sums, own, strict=True):
                total += part
        for p, master, total in zip(reference.parameters(), masters, sums, strict=True):
            master -= 0.01 * total.to(grad_dtype)
            p.data.copy_(master)
    engine.sync_parameters()
    assert_models_close(model, reference, 1e-6 if grad_dtype == torch.float32 else 5e-3)
    engine.refresh_masters()
    for bucket in engine.buckets:
        assert torch.equal(bucket.shard.master.detach(), bucket.own_params.float())


@pytest.mark.parametrize("level", ["no_shard", "optim"])
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
def test_half_parameters_with_float32_masters(level: str, grad_dtype: str) -> None:
    run(_half_parameters, 2, level, grad_dtype)


def test_parameters_keep_identity_and_values() -> None:
    model = build()
    parameters, values = list(model.parameters()), copy.deepcopy(model.state_dict())
    engine = DataParallelEngine(infos(model), ParallelMesh())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])
    assert all(p.main_grad.shape == p.shape for p in model.parameters())  # type: ignore[attr-defined]
    assert engine.memory() == {"parameters": 6 * 64 * 8, "gradients": 6 * 64 * 8, "masters": 0}


def test_gradients_go_back_to_autograd_when_training_ends() -> None:
    model, reference = build(), build()
    first, engine = (DataParallelEngine(infos(model), ParallelMesh()) for _ in range(2))
    inputs = batches(0, 1, 1)
    loss(reference, inputs).backward()
    accumulate(engine, model, inputs[0])
    assert not any(bucket.grads.any() for bucket in first.buckets), "the second engine has taken over"
    engine.close()
    assert engine.memory()["gradients"] == 0
    assert not any(hasattr(p, "main_grad") or p.grad is not None for p in model.parameters())
    loss(model, inputs).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


def test_frozen_parameters_are_left_alone() -> None:
    model = build()
    model[0].requires_grad_(False)
    pointer = model[0].weight.data_ptr()
    engine = DataParallelEngine(infos(model), ParallelMesh())
    assert model[0].weight.data_ptr() == pointer
    assert not hasattr(model[0].weight, "main_grad")
    accumulate(engine, model, batches(0, 1, 1)[0])
    assert model[0].weight.grad is None


def _masters_keep_more_than_parameters() -> None:
    model, values = build(torch.bfloat16), dict(build(torch.float32).named_parameters())
    engine = DataParallelEngine(infos(model), mesh(), DataParallelOptions(bucket_size=30))
    for name, value in values.items():
        engine.fill_masters(name, value)
    engine.fill_masters("someone else's", torch.zeros(3))
    for shard in engine.shards:
        for piece, first, last, start in shard.intervals():
            assert torch.equal(shard.master[start : start + last - first], values[piece.name].flatten()[first:last])


def test_masters_keep_more_than_parameters() -> None:
    run(_masters_keep_more_than_parameters, 4)


class Tied(nn.Module):
    """One weight used by an autograd op and by an op that adds to ``main_grad`` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.skip = nn.Parameter(torch.ones(3))
        self.use_skip = False

    def forward(self, x: Tensor) -> Tensor:
        y = FusedLinear.apply(torch.tanh(self.first(x)), self.second.weight)
        return y + self.skip.sum() if self.use_skip else y


class FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        if not hasattr(weight, "main_grad"):
            return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)
        add_gradient(weight, grad.flatten(0, -2).T @ x.flatten(0, -2))
        return grad @ weight, None


def _tied_and_unused() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    model = Tied().double()
    reference = copy.deepcopy(model)
    engine = DataParallelEngine(infos(model), mesh(), DataParallelOptions(bucket_size=1))
    assert len(engine.infos) == 2
    for step in range(3):
        inputs = batches(step, world, 2)
        reference.zero_grad()
        loss(reference, inputs).backward()
        accumulate(engine, model, inputs[rank])
        assert reference.first.weight.grad is not None
        assert_close(engine.grad_norm(), reference.first.weight.grad.norm())


@pytest.mark.parametrize("world", [1, 2])
def test_tied_and_unused_parameters(world: int) -> None:
    run(_tied_and_unused, world)


def _sent_early() -> list[int]:
    """How many buckets were under way when the last backward pass of each of three steps ended."""
    model = build()
    engine = DataParallelEngine(infos(model), mesh(), DataParallelOptions(bucket_size=1))
    sent = []
    for step in range(3):
        engine.zero_grad()
        with engine.micro_batches(2):
            for x, last in zip(batches(step, 1, 2)[0], (False, True), strict=True):
                loss(model, x).backward()
                assert last or not any(bucket.sent for bucket in engine.buckets)
        sent.append(sum(bucket.sent for bucket in engine.buckets))
        engine.finish_grad_sync()
    return sent


def test_buckets_are_sent_during_the_last_backward_once_it_is_known_what_arrives() -> None:
    assert run(_sent_early, 2) == [[0, 6, 6]] * 2


def _given_up_halfway() -> None:
    """A backward pass that fails after buckets were sent; the next step is as if it had never been."""
    model, reference = build(), build()
    engine = DataParallelEngine(infos(model), mesh(), DataParallelOptions(bucket_size=1))
    inputs = batches(0, dist.get_world_size(), 1)
    accumulate(engine, model, inputs[dist.get_rank()])
    engine.zero_grad()
    with suppress(KeyboardInterrupt), engine.micro_batches(1):
        loss(model, 100 * inputs[dist.get_rank()]).backward()
        assert all(bucket.sent for bucket in engine.buckets)
        raise KeyboardInterrupt
    accumulate(engine, model, inputs[dist.get_rank()])
    loss(reference, inputs).backward()
    norms = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None])
    assert_close(engine.grad_norm(), norms.norm())


def test_a_step_can_be_given_up_halfway() -> None:
    run(_given_up_halfway, 2)


def test_late_gradient_is_an_error_with_the_remedy() -> None:
    model = Tied().double()
    engine = DataParallelEngine(infos(model), ParallelMesh())
    accumulate(engine, model, batches(0, 1, 2)[0])
    with pytest.raises(MegalightError, match=r"arrived after its bucket.*overlap_grad_reduce.*zero_grad"):
        loss(model, batches(1, 1, 1)[0]).backward()


def test_a_parameter_never_used_before_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    model = Tied().double()
    engine = DataParallelEngine(infos(model), ParallelMesh(), DataParallelOptions(bucket_size=1))
    with caplog.at_level("INFO"):
        accumulate(engine, model, batches(0, 1, 2)[0])
        accumulate(engine, model, batches(0, 1, 2)[0])
    message, warning = caplog.messages  # each once
    assert "1 parameters got no gradient in the first step (skip" in message
    assert warning.startswith("skip got no gradient in a step, and counts as if it were zero")
    assert "find_unused_parameters=True" in warning
    model.use_skip = True
    accumulate(engine, model, batches(1, 1, 1)[0])
    model.use_skip = False
    accumulate(engine, model, batches(2, 1, 1)[0])


def test_gradients_set_to_none_by_others_still_arrive() -> None:
    model, reference = build(), build()
    engine = DataParallelEngine(infos(model), ParallelMesh())
    x = batches(0, 1, 1)[0]
    engine.zero_grad()
    model.zero_grad(set_to_none=True)
    for _ in range(2):
        loss(model, x).backward()
        loss(reference, x).backward()
    engine.finish_grad_sync()
    for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert expected.grad is not None
        assert_close(p.main_grad, expected.grad)  # type: ignore[attr-defined]


def test_gradients_of_gradients_are_refused() -> None:
    model = build()
    DataParallelEngine(infos(model), ParallelMesh())
    with pytest.raises(MegalightError, match=r"create_graph.*torch\.autograd\.grad"):
        loss(model, batches(0, 1, 1)[0]).backward(create_graph=True)


def test_memory_is_given_back() -> None:
    model = build()
    engine = DataParallelEngine(infos(model), ParallelMesh())
    engine.parameters.attach_gather_hooks(model)
    accumulate(engine, model, batches(0, 1, 1)[0])
    left = weakref.ref(engine), weakref.ref(engine.buckets[0].grads)
    del model, engine
    gc.collect()
    assert [each() for each in left] == [None, None]


def test_norm_before_reduction_is_an_error() -> None:
    engine = DataParallelEngine(infos(build()), ParallelMesh())
    engine.zero_grad()
    with pytest.raises(MegalightError, match="finish_grad_sync"):
        engine.grad_norm()


def test_meta_parameters_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(MegalightError, match=r"bias on meta.*Materialize"):
        DataParallelEngine(infos(model), ParallelMesh())


def test_a_model_without_trainable_parameters() -> None:
    engine = DataParallelEngine(infos(build().requires_grad_(False)), ParallelMesh())
    engine.zero_grad()
    with engine.micro_batches(1):
        pass
    engine.finish_grad_sync()
    engine.scale_gradients(torch.tensor(0.5))
    engine.publish()
    assert engine.grad_norm() == 0


def test_gradients_are_scaled() -> None:
    model = build()
    engine = DataParallelEngine(infos(model), ParallelMesh(), DataParallelOptions(bucket_size=30))
    accumulate(engine, model, batches(0, 1, 1)[0])
    norm = engine.grad_norm()
    engine.scale_gradients(torch.tensor(0.25, dtype=torch.float64))
    assert_close(engine.grad_norm(), 0.25 * norm)


def test_intervals_cover_every_element_once() -> None:
    spec = ShardSpec.replicated("w", (5, 31))
    for level, world in (("optim", 3), ("no_shard", 3)):
        covered = torch.zeros(5 * 31)
        for rank in range(1 if level == "no_shard" else world):
            parameter = nn.Parameter(torch.arange(5.0 * 31).view(5, 31))
            engine = _without_groups([ParamInfo("w", parameter, spec, 0)], world, rank, level)
            for shard in engine.shards:
                for piece, first, last, start in shard.intervals():
                    assert piece.name == "w"
                    covered[first:last] += 1
                    part = shard.master.detach()[start : start + last - first]
                    assert torch.equal(part, torch.arange(first, last).float())
        assert torch.equal(covered, torch.ones(5 * 31))


class _Mesh(ParallelMesh):
    """Knows its place; has no process groups."""

    def group(self, *axes: str) -> None:
        return None


def _without_groups(params: list[ParamInfo], world: int, rank: int, level: str) -> DataParallelEngine:
    with patch.object(engine_module, "shared_group", lambda ranks, purpose: None):
        return DataParallelEngine(params, _Mesh(world, rank), DataParallelOptions(level=level))
