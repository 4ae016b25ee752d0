"""Units: modules whose parameters and gradients are whole only while they compute."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalight.errors import ConfigurationError, MegalightError
from megalight.ops.parameter import state_of
from megalight.parallel.data_parallel import (
    AdvancedDataParallelOptions,
    DataParallelEngine,
    DataParallelOptions,
    ParamInfo,
    unshard,
)
from megalight.parallel.data_parallel.layout import BucketKey, BucketLayout, align, plan_buckets
from megalight.parallel.data_parallel.unit_memory import choose
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.run_engine import owned_alone, units_of
from megalight.parallel.shard import ShardSpec
from tests.parallel.data_parallel.helpers import assert_close, assert_models_close, mesh
from tests.parallel.data_parallel.stale import stale_gradients
from tests.support.options import data_parallel
from tests.support.workers import run

WIDTH = 6
STEPS = 2
"""The engine learns in the first step when gradients arrive, and sends them early in the second one."""


class Block(nn.Module):
    """A residual layer of odd sizes, with a convolution's weight and one parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.mix = nn.Conv1d(7, WIDTH, 3, padding=1)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = torch.tanh(self.up(self.norm(x) + self.frozen))
        return {"hidden": [x + self.mix(y.t()).t()], "name": "block"}


class Net(nn.Module):
    """Blocks, called in a given order, between an embedding and a head that share a weight."""

    def __init__(self, layers: int, order: tuple[int, ...] | None = None, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.bias = nn.Parameter(torch.zeros(9))
        self.order = tuple(range(layers)) if order is None else order
        self.recompute = recompute
        if layers > 1:
            self.blocks[1].up.bias = self.blocks[0].up.bias  # two units hold it

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for place in self.order:
            block = self.blocks[place]
            x = (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))["hidden"][0]
        return x @ self.embed.weight.t() + self.bias


def engine_of(net: nn.Module, level: str = "optim_grads_params", **options: Any) -> DataParallelEngine:
    units = units_of(net)
    numbers = owned_alone(net, units)
    infos = [
        ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), int(p.ndim < 2), unit=numbers.get(id(p)))
        for name, p in net.named_parameters()
    ]
    return DataParallelEngine(infos, mesh(), data_parallel(level=level, **options), units=units)


def loss_of(net: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(net(ids), ids.roll(1), reduction="sum")


def ids_of(step: int, world: int, micro: int) -> Tensor:
    return torch.randint(0, 9, (world, micro, 5), generator=torch.Generator().manual_seed(step))


def _train(net: nn.Module, engine: DataParallelEngine, micro: int, steps: int = STEPS) -> None:
    optimizer = torch.optim.AdamW([shard.master for shard in engine.shards], lr=0.05)
    for step in range(steps):
        ids = ids_of(step, dist.get_world_size(), micro)[dist.get_rank()]
        with stale_gradients():
            engine.zero_grad()
        for some, last in ((ids[:1], micro == 1), (ids[1:], True)):
            if len(some):
                with engine.micro_batches(len(some), last):
                    for row in some:
                        loss_of(net, row).backward()
        engine.finish_grad_sync()
        engine.scale_gradients(torch.tensor(0.9, dtype=torch.float64))
        optimizer.step()
        engine.publish()


def _reference(net: nn.Module, micro: int, steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for row in ids_of(step, dist.get_world_size(), micro).flatten(0, 1):
            loss_of(net, row).backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        norms.append(float(torch.stack([g.norm() for g in gradients]).norm()) * 0.9)
        for p in net.parameters():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.mul_(0.9)
        optimizer.step()
    return norms


def _equals_one_process(replicate: int = 1) -> None:
    orders = [(3, None), (4, None), (3, (0, 0, 2, 1, 0)), (4, (3, 1, 0)), (2, None)]
    # Buffers and reductions that the engine would choose by memory, which is not known here.
    choices: list[dict[str, Any]] = [
        {},
        {},
        {"prefetch": 0, "reduce_each_micro_batch": False},
        {"prefetch": 2},
        {"prefetch": 3, "reduce_each_micro_batch": False},
    ]
    for number, (layers, order) in enumerate(orders):
        level = ("optim_grads_params", "optim_grads")[number == 1]
        expected = Net(layers, order).double()
        norms = _reference(expected, micro=1 + number % 3)
        for recompute in (False, True) if number < 3 and replicate == 1 else (False,):
            net = Net(layers, order, recompute).double()
            engine = engine_of(net, level, replicate=replicate, **choices[number])
            _train(net, engine, micro=1 + number % 3)
            engine.sync_parameters()  # what is in no unit may still be on its way
            assert_close(engine.grad_norm(), torch.tensor(norms[-1], dtype=torch.float64))
            with torch.no_grad():
                ids = ids_of(9, 1, 1)[0, 0]
                assert_close(net(ids), expected(ids))
                assert_close(net(ids), expected(ids))  # the first units were fetched again
            assert engine.units is not None
            with engine.units.full_parameters():
                assert_models_close(net, expected)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
def test_equals_one_process(world: int) -> None:
    """Units called in any order, twice, or not at all; shared, unused and frozen parameters; recompute."""
    run(_equals_one_process, world)


def test_hybrid_shards_equal_one_process() -> None:
    run(_equals_one_process, 4, 2)


def _bytes(net: Net) -> tuple[dict[str, int], dict[str, int]]:
    """What an engine says that it holds, and the formula."""
    engine = engine_of(net.bfloat16())
    world = dist.get_world_size()
    sizes: dict[tuple[object, ...], int] = {}
    for bucket in engine.buckets:
        used = sum(align(info.parameter.numel(), 64) for info in bucket.infos)
        numel = align(used, 128 * world)
        assert bucket.layout.numel - numel in (0, -128 * world), "padding only"
        unit = bucket.layout.kind.unit
        if unit is None:
            sizes["whole", bucket] = bucket.layout.numel
        else:
            sizes["own", bucket] = bucket.layout.numel // world
            turn = ("turn", unit % 2, bucket.layout.kind.group)
            sizes[turn] = max(sizes.get(turn, 0), bucket.layout.numel)
    frozen: dict[object, int] = {}
    for flat in engine.frozen_shards.buckets:
        turn = ("turn", flat.layout.kind.unit % 2)  # type: ignore[operator]
        frozen["own", flat] = flat.layout.numel // world
        frozen[turn] = max(frozen.get(turn, 0), flat.layout.numel)
    total, beside = sum(sizes.values()), sum(frozen.values())
    masters = sum(bucket.layout.numel // world for bucket in engine.buckets)
    return engine.memory(), {"parameters": 2 * (total + beside), "gradients": 4 * total, "masters": 4 * masters}


def _memory() -> None:
    said, formula = _bytes(Net(8))
    assert said == formula
    shallow, _ = _bytes(Net(4))
    world = dist.get_world_size()
    for kind, size in (("parameters", 2), ("gradients", 4)):
        # four more layers cost their shards, and nothing else
        matrices = align(align(7 * WIDTH, 64) + align(7 * WIDTH * 3, 64), 128 * world)
        vectors = align(6 * 64, 128 * world)
        frozen = 128 * world if kind == "parameters" else 0
        assert said[kind] - shallow[kind] == 4 * size * (matrices + vectors + frozen) // world


def test_memory_is_the_formula() -> None:
    """Each rank keeps shards, two units' worth of buffers, and what lies outside of units."""
    run(_memory, 2)


def _prefetch(depth: int) -> list[int]:
    net = Net(5).double()
    engine = engine_of(net, prefetch=depth)
    assert engine.units is not None
    seen: list[int] = []
    unit_of = {b.own_params.data_ptr(): b.layout.kind.unit for b in engine.units.buckets if b.layout.kind.group == 0}
    gather = unshard.gather

    def noted(whole: Tensor, own: Tensor, group: Any) -> Any:
        if own.data_ptr() in unit_of:
            seen.append(unit_of[own.data_ptr()])
        return gather(whole, own, group)

    with patch.object(unshard, "gather", noted):
        _train(net, engine, micro=1, steps=1)
    return seen


@pytest.mark.parametrize(
    ("depth", "order"),
    [
        (0, [0, 1, 2, 3, 4, 3, 2, 1, 0, 0]),
        (1, [0, 1, 2, 3, 4, 2, 1, 0, 0, 1]),
        (2, [0, 1, 2, 3, 4, 1, 0, 0, 1, 2]),
        (9, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]),
    ],
)
def test_each_unit_is_gathered_before_it_is_needed(depth: int, order: list[int]) -> None:
    """Forward, then back from those that are still there; the first ones again for the next step."""
    assert run(_prefetch, 2, depth) == [order] * 2


class Branch(nn.Module):
    """Some batches do not use ``extra``, as some experts get no token."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.extra = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        x = x + torch.tanh(self.up(x))
        return x + self.extra(x) if uses else x


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Branch() for _ in range(4))
        self.double()

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, uses)
        return x


class Cast:
    """In the place of a weight's precision: keeps a cast of the weight since its last use."""

    kept = False

    def forget(self) -> None:
        self.kept = False


def _casts() -> list[list[bool]]:
    net = Net(5).double()
    engine = engine_of(net)
    casts = [Cast() for _ in net.blocks]
    for block, cast in zip(net.blocks, casts, strict=True):
        state_of(block.up.weight).precision = cast  # type: ignore[assignment]
        block.register_forward_hook(lambda *_, cast=cast: setattr(cast, "kept", True))
    engine.zero_grad()
    loss, seen = loss_of(net, ids_of(0, 1, 1)[0, 0]), []
    seen.append([cast.kept for cast in casts])
    loss.backward()
    seen.append([cast.kept for cast in casts])
    return seen


def test_casts_of_whole_weights_go_with_them() -> None:
    """Those of the two units that still have memory stay: forward the last ones, backward the first ones."""
    assert run(_casts, 2) == [[[False] * 3 + [True] * 2, [False] * 5]] * 2


def _uneven_use() -> list[list[float]]:
    norms: list[list[float]] = []
    for each in (True, False):
        net = Branches()
        engine = engine_of(net, reduce_each_micro_batch=each)
        norms.append([])
        for step in range(3):
            engine.zero_grad()
            with engine.micro_batches(1):
                x = torch.full((2, WIDTH), 0.1 * (step + 1), dtype=torch.float64)
                net(x, step == 0 or dist.get_rank() == 0).square().sum().backward()
            engine.finish_grad_sync()
            norms[-1].append(float(engine.grad_norm()))
            engine.publish()
        engine.sync_parameters()
    return norms


def test_ranks_that_use_different_parameters() -> None:
    """Their whole gradients are complete at different times, between gathers of units that all ranks make alike."""
    for each, whole in run(_uneven_use, 2, timeout=60):
        assert_close(torch.tensor(whole), torch.tensor(each))


def _kept_gradients() -> tuple[int, int]:
    whole, shards = (engine_of(Net(12).bfloat16(), reduce_each_micro_batch=each) for each in (False, True))
    in_units = sum(b.layout.numel for b in whole.buckets if b.layout.kind.unit is not None)
    assert whole.memory()["gradients"] > 4 * in_units > shards.memory()["gradients"]
    assert not whole.main_gradients.of_units.buckets
    assert whole.memory()["parameters"] == shards.memory()["parameters"]
    return len(whole.main_gradients.of_units.buckets), len(shards.main_gradients.of_units.buckets)


def test_whole_gradients_are_kept_beside_shards_of_parameters() -> None:
    assert run(_kept_gradients, 2) == [(0, 24)] * 2


def _layouts(units: int, ranks: int) -> list[BucketLayout]:
    """Units of 2**20 parameters in bfloat16, and one more bucket outside of units."""
    across = ParallelMesh(ranks, 0)
    kinds = [BucketKey(torch.bfloat16, torch.float32, 0, mesh=across, unit=unit) for unit in (*range(units), None)]
    return plan_buckets([2**20] * (units + 1), kinds)


def test_buffers_follow_from_the_free_memory() -> None:
    layouts = _layouts(12, ranks=4)
    buffer, whole = 2 * 2**20, 12 * 4 * 2**20

    def chosen(free: int | None, params: bool = True, **given: Any) -> tuple[int, bool]:
        memory = choose(layouts, params, given.get("prefetch"), given.get("each"), free)
        for reason in memory.reasons.values():
            assert ("free" in reason) or ("as data_parallel" in reason)
        return memory.prefetch, memory.reduce_each

    assert chosen(None) == (1, True)
    assert chosen(40 * buffer) == (1, True)
    assert chosen(151 * buffer) == (2, True)
    assert chosen(1000 * buffer) == (3, False)
    assert chosen(1000 * buffer, params=False)[1]
    assert chosen(1000 * buffer, prefetch=1, each=True) == (1, True)
    assert chosen(10 * whole - 1)[1]
    assert not chosen(10 * whole + 10)[1]
    assert (
        "2 ahead, 3 buffers of 0.002 GiB: 2.0% of the 0.295 GiB free"
        in choose(layouts, True, None, None, 151 * buffer).reasons["prefetch"]
    )


@pytest.mark.parametrize(("units", "ranks", "prefetch"), [(6, 2, 1), (12, 2, 2), (16, 2, 3), (6, 8, 1), (10, 8, 3)])
def test_buffers_take_half_of_what_sharding_saves_at_most(units: int, ranks: int, prefetch: int) -> None:
    """However much memory is free: with more of them, few units would take more memory than whole parameters do."""
    assert choose(_layouts(units, ranks), True, None, None, 2**40).prefetch == prefetch


def _read_while_gathered() -> bool:
    """Whether the shared embedding, which is in no unit, has arrived when everything is said to be whole."""
    net = Net(3).double()
    engine = engine_of(net)
    _train(net, engine, micro=1, steps=1)
    waits = engine.parameters.gatherer._waits
    assert waits, "it is still on its way"
    assert engine.units is not None
    with engine.units.full_parameters():
        return not waits


def test_parameters_outside_of_units_are_waited_for_as_well() -> None:
    assert run(_read_while_gathered, 2) == [True] * 2


class Opaque(Net):
    """A block that hides its output."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block.inner(x)["hidden"][0]
        return x @ self.embed.weight.t()


def _refused() -> None:
    net = Opaque(3)
    for block in net.blocks:
        block.inner = block.forward
    engine = engine_of(net)
    with pytest.raises(MegalightError, match=r"outside the backward pass of its unit.*data_parallel\.units"):
        _train(net, engine, micro=1)
    net = Net(3).double()
    engine, expected = engine_of(net), Net(3).double()

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("in the middle")

    def backward() -> None:
        hook = net.blocks[0].register_forward_pre_hook(lambda module, args: args[0].register_hook(fail) and None)
        out = net(ids_of(0, 1, 1)[0, 0])
        hook.remove()
        with engine.micro_batches(1):
            out.sum().backward()

    engine.zero_grad()
    with pytest.raises(RuntimeError, match="in the middle"):
        backward()
    _train(net, engine, micro=2)
    _reference(expected, micro=2)
    assert engine.units is not None
    with engine.units.full_parameters():
        assert_models_close(net, expected)


def test_gradients_outside_a_unit_are_refused_and_a_failed_step_leaves_nothing() -> None:
    run(_refused, 2)


def _low_precision_sums(replicate: int, both: bool = False) -> None:
    """Sums in float32 of gradients in bfloat16, over ranks and micro-batches, against float64."""
    errors = {}
    for reduction in ("sum", "accumulate_fp32"):
        net = Net(4).bfloat16()
        exact = Net(4).bfloat16().double()
        engine = engine_of(
            net,
            gradient_dtype="bfloat16",
            reduce_scatter_with_fp32_accumulation=reduction != "sum",
            replicate=replicate,
            replicate_optimizer=not both,
        )
        engine.zero_grad()
        ids = ids_of(0, dist.get_world_size(), 6)
        with engine.micro_batches(6):
            for row in ids[dist.get_rank()]:
                loss_of(net, row).backward()
        engine.finish_grad_sync()
        sums = [bucket.own_grads for bucket in engine.buckets if bucket.shards_grads]
        assert {s.dtype for s in sums} == {torch.float32 if reduction != "sum" else torch.bfloat16}
        for row in ids.flatten(0, 1):
            loss_of(exact, row).backward()
        whole = torch.stack([p.grad.norm() for p in exact.parameters() if p.grad is not None]).norm()
        errors[reduction] = float(abs(engine.grad_norm() - whole) / whole)
    assert errors["accumulate_fp32"] < 0.01


@pytest.mark.parametrize(
    ("world", "replicate", "both"),
    [
        pytest.param(2, 1, False, marks=pytest.mark.full),
        pytest.param(4, 2, False, marks=pytest.mark.full),
        pytest.param(4, 2, True, marks=pytest.mark.full),
    ],
)
def test_sums_in_float32_of_gradients_in_bfloat16(world: int, replicate: int, both: bool) -> None:
    run(_low_precision_sums, world, replicate, both)


def _uneven_groups() -> None:
    with pytest.raises(ConfigurationError, match=r"replicate=2 does not divide the 3 ranks along dp"):
        engine_of(Net(2), replicate=2)


def test_groups_must_be_equal() -> None:
    run(_uneven_groups, 3)


def _divided() -> None:
    """Parameters are shared by two groups of two ranks, and masters by all four."""
    net = Net(4).bfloat16()
    engine = engine_of(net, replicate=2, replicate_optimizer=False)
    for bucket in (bucket for bucket in engine.buckets if bucket.shards_params):
        assert bucket.own_params.numel() == bucket.layout.numel // 2
        assert bucket.shard.numel == bucket.own_grads.numel() == bucket.layout.numel // 4
    # Writes reach all ranks whether they go to masters or to whole parameters.
    for shard in engine.shards:
        shard.master.detach().fill_(3.0)
    engine.publish()
    engine.gather_parameters()
    trained = [p for p in net.parameters() if p.requires_grad]
    assert all(bool((p == 3).all()) for p in trained)
    for number, parameter in enumerate(trained):
        parameter.detach().fill_(number)
    engine.release_parameters()
    engine.refresh_masters()
    numbers = {id(parameter): number for number, parameter in enumerate(trained)}
    for bucket in engine.buckets:
        masters = bucket.gathered(bucket.shard.master.detach())
        for info, slot in zip(bucket.infos, bucket.layout.slots, strict=True):
            assert bool((masters[slot.start : slot.stop] == numbers[id(info.parameter)]).all())


def test_replicas_may_divide_the_optimizer() -> None:
    run(_divided, 4)
    with pytest.raises(ConfigurationError, match=r"replicate_optimizer=False with replicate=1: .*set replicate"):
        DataParallelOptions(advanced=AdvancedDataParallelOptions(replicate_optimizer=False)).check("auto")


class Model(nn.Module):
    """A model with layers between an embedding and a head, which have modules of their own or not."""

    def __init__(self, tied: bool, plain: bool = False) -> None:
        super().__init__()
        word, out = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9, bias=False)
        if tied:
            out.weight = word.weight
        self.embed: nn.Module = word if plain else nn.Sequential(word)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head: nn.Module = out if plain else nn.Sequential(nn.LayerNorm(WIDTH), out)


def test_units_are_found() -> None:
    net = Net(3)
    assert units_of(net) == [(block,) for block in net.blocks]
    assert units_of(net, ("Linear",)) == [(block.up,) for block in net.blocks]
    assert units_of(net, (Block,)) == [(block,) for block in net.blocks]
    assert units_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    with pytest.raises(ConfigurationError, match=r"names 'Layer', and no outermost module of Net is one; it has Block"):
        units_of(net, ("Block", "Layer"))
    assert sorted(set(owned_alone(net, units_of(net)).values())) == [0, 1, 2]
    assert id(net.blocks[0].up.bias) not in owned_alone(net, units_of(net))
    for model in (Model(tied=False), Model(tied=True)):
        tied, layers = model.head[1].weight is model.embed[0].weight, list(model.layers)
        units = units_of(model)
        edges = [(model.embed, model.head)] if tied else [(model.embed,), (model.head,)]
        assert units == [edges[0], *((layer,) for layer in layers), *edges[1:]]
        numbers = owned_alone(model, units)
        assert len(numbers) == len(list(model.parameters())), "every parameter is in a unit"
        assert numbers[id(model.head[1].weight)] == (0 if tied else 3)
    ends = Model(tied=True, plain=True)
    assert units_of(ends, ("Block", "Embedding", "Linear")) == [
        (ends.embed, ends.head),
        *((layer,) for layer in ends.layers),
    ]
    assert len(units_of(Model(tied=False, plain=True), ("Block", "Embedding", "Linear"))) == 4
    alike = nn.ModuleList(Block() for _ in range(3))
    alike[2].up.bias = alike[0].up.bias
    assert len(units_of(alike, (Block,))) == 3, "layers of one class never compute together"
    bare = Model(tied=True, plain=True)
    assert units_of(bare) == [(layer,) for layer in bare.layers], "the model itself may read the weights of the others"


def test_options_of_units_need_sharded_parameters() -> None:
    with pytest.raises(ConfigurationError, match=r"data_parallel\.prefetch=-1; it must be at least 0"):
        DataParallelOptions(prefetch=-1)
    for given in ({"prefetch": 2}, {"reduce_each_micro_batch": True}):
        for level in ("optim", "optim_grads"):
            options = DataParallelOptions(level=level, **given)  # type: ignore[arg-type]
            with pytest.raises(ConfigurationError, match=rf"level '{level}', which shards no parameters; leave it out"):
                options.check("auto")
        DataParallelOptions(level="optim_grads_params", **given).check("auto")  # type: ignore[arg-type]
