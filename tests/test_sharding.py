"""Full sharding in a plain torch loop, of models of torch and transformers, where Lightning is not installed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import megalight
from megalight.errors import ConfigurationError, MegalightError
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.mesh import ParallelMesh
from megalight.sharding import _device_of
from tests.parallel.test_transformers import llama
from tests.support.workers import run

STEPS, WORLD = 3, 2


def _model(checkpointing: bool = False) -> Any:
    torch.manual_seed(4)
    model = llama(4, 2, tied=True).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    return model


@pytest.mark.parametrize(
    ("backend", "here", "kind", "wanted"),
    [
        ("gloo", "cpu", None, "cpu"),
        ("gloo", "meta", None, "cpu"),
        ("nccl", "cpu", None, "cuda:3"),
        ("nccl", "meta", None, "cuda:3"),
        ("cpu:gloo,cuda:nccl", "cpu", None, "cpu"),
        ("cpu:gloo,cuda:nccl", "meta", None, "cuda:3"),
        ("cpu:gloo,cuda:nccl", "cpu", "cuda", "cuda:3"),
        ("nccl", "meta", "cuda", "cuda:3"),
    ],
)
def test_a_module_goes_where_ranks_can_send_from(backend: str, here: str, kind: str | None, wanted: str) -> None:
    with (
        patch.object(dist, "is_initialized", lambda: True),
        patch.object(dist, "get_backend", lambda: backend),
        patch.object(torch.cuda, "current_device", lambda: 3),
    ):
        assert _device_of(nn.Linear(2, 2, device=here), kind) == torch.device(wanted)


def _ids(step: int) -> torch.Tensor:
    """``[ranks, backward passes, 2, 7]``"""
    return torch.randint(51, (WORLD, 2, 2, 7), generator=torch.Generator().manual_seed(step))


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def _by_hand() -> tuple[list[float], list[float], np.ndarray[Any, Any]]:
    """Mean losses over all ranks, norms and weights of torch alone."""
    model, losses, norms = _model(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = sum(_loss(model, ids) for ids in _ids(step).flatten(0, 1)) / WORLD
        total.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(total.detach()))
    return losses, norms, _flat(model)


def _flat(model: nn.Module) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    return found


def _steps(sharded: Any, model: Any, steps: range) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in steps:
        passes = [_loss(model, ids) for ids in _ids(step)[dist.get_rank()]]
        for loss in passes:
            loss.backward()
        total = torch.stack(passes).detach().sum()
        dist.all_reduce(total)
        norms.append(float(sharded.clip_grad_norm_(0.5)))
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        losses.append(float(total / WORLD))
    return losses, norms


def _trained(checkpointing: Any, path: str, fraction: float) -> tuple[list[float], list[float], np.ndarray[Any, Any]]:
    model = _model(checkpointing)
    if dist.get_rank():
        nn.init.zeros_(model.lm_head.weight)  # rank 0's values count
    options = DataParallelOptions(optimizer_offload_fraction=fraction)
    units = () if fraction else ("LlamaDecoderLayer", "Embedding", "Linear")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sharded = megalight.fully_shard(model, optimizer, units=units, data_parallel=options)
    if units:  # the embedding and the head share a weight
        whole = [info.name for b in sharded.engine.buckets if b.layout.kind.unit is None for info in b.infos]
        assert whole == ["model.norm.weight"]
    _loss(model, _ids(9)[0, 0]).backward()
    sharded.optimizer.zero_grad()  # discards it
    losses, norms = _steps(sharded, model, range(1))
    sharded.save(path, step=1)
    _steps(sharded, model, range(1, 2))
    if fraction == 1:  # resume with everything on the device again
        model = _model(checkpointing)
        sharded = megalight.fully_shard(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert sharded.load(path) == {"step": 1}
    for found, more in zip((losses, norms), _steps(sharded, model, range(1, STEPS)), strict=True):
        found += more
    with sharded.full_parameters():
        return losses, norms, _flat(model)


@pytest.mark.parametrize(("checkpointing", "fraction"), [(False, 0.0), (True, 1.0), ("reentrant", 0.5)])
def test_a_model_of_transformers_trains_as_on_one_device(checkpointing: Any, fraction: float, tmp_path: Path) -> None:
    """With several backward passes per step, clipping, a checkpoint in the middle, and masters on the host."""
    losses, norms, weights = _by_hand()
    for found in run(_trained, WORLD, checkpointing, str(tmp_path / "saved"), fraction):
        np.testing.assert_allclose(found[0], losses, rtol=1e-9)
        np.testing.assert_allclose(found[1], norms, rtol=1e-9)
        assert np.linalg.norm(found[2] - weights) <= 1e-9 * np.linalg.norm(weights)


@pytest.mark.parametrize("kind", [megalight.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_steps_without_clipping_reach_masters_on_the_host(kind: Any) -> None:
    """Nothing but the step itself completes the sums, before they go to the host."""
    found = []
    for fraction in (0.0, 0.5, 1.0):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Sequential(nn.Linear(5, 4), nn.Tanh()))
        before = _flat(model.double()).copy()
        optimizer = kind(model.parameters(), lr=0.1)
        options = DataParallelOptions(level="no_shard", bucket_size=15, optimizer_offload_fraction=fraction)
        sharded = megalight.fully_shard(model, optimizer, data_parallel=options)
        for step in range(2):
            model(torch.full((2, 3), 1.0 + step, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        with sharded.full_parameters():
            found.append(_flat(model).copy())
        assert (found[-1] != before).all(), fraction
    for other in found[1:]:
        assert np.array_equal(found[0], other)


def _clipped(kind: Any, skip: bool) -> tuple[list[float], np.ndarray[Any, Any]]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Sequential(nn.Linear(5, 4), nn.Tanh())).double()
    optimizer = kind(model.parameters(), lr=0.1)
    sharded, norms = megalight.fully_shard(model, optimizer), []
    for step in range(3):
        model(torch.full((2, 3), 1.0 + step, dtype=torch.float64)).square().sum().backward()
        norms.append(float(sharded.clip_grad_norm_(0.5)))
        if skip and step == 0:
            optimizer.zero_grad()  # with the factors of its clipping
        else:
            optimizer.step()
    with sharded.full_parameters():
        return norms, _flat(model).copy()


@pytest.mark.parametrize("kind", [megalight.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("skip", [False, True])
def test_means_are_clipped_whoever_multiplies(kind: Any, skip: bool) -> None:
    """Ranks see the same, so their mean is that of one. Our Adam multiplies later, in its step."""
    norms, weights = run(_clipped, 1, kind, skip)[0]
    assert min(norms) > 0.5
    for found in run(_clipped, WORLD, kind, skip):
        np.testing.assert_allclose(found[0], norms, rtol=1e-12)
        np.testing.assert_allclose(found[1], weights, rtol=1e-12)
    if kind is megalight.optim.Adam:
        np.testing.assert_allclose(weights, run(_clipped, 1, torch.optim.AdamW, skip)[0][1], rtol=1e-9)


class Twice(torch.optim.SGD):
    """Steps from where it was with the gradients of where a first step led to."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in held]
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            for parameter, value in zip(held, before, strict=True):
                parameter.copy_(value - 0.2 * parameter.grad)
        return loss


class Pair(nn.Sequential):
    """A unit, by its name."""


def _blocks(level: str | None, kind: Any = torch.optim.SGD) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and what ``fully_shard`` returns."""
    torch.manual_seed(4)
    model = nn.Sequential(*(Pair(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)), nn.Linear(4, 2)).double()
    optimizer = kind(model.parameters(), lr=0.1)
    if level is None:
        return model, optimizer, None
    options = DataParallelOptions(level=level, units=("Pair",) if "grads" in level else ())  # type: ignore[arg-type]
    sharded = megalight.fully_shard(model, optimizer, data_parallel=options)
    assert dist.get_world_size() == 1 or (sharded.engine.units is None) == (not options.units)
    return model, optimizer, sharded


def _inputs(step: int) -> torch.Tensor:
    """``[ranks, backward passes, 3, 4]``"""
    shape, drawn = (WORLD, 2, 3, 4), torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=drawn, dtype=torch.float64)


def _closures(kind: Any, level: str | None, clears: bool) -> tuple[list[float], np.ndarray[Any, Any]]:
    """Steps by closures with two backward passes, on the whole batch or a rank's part of it."""
    model, optimizer, sharded = _blocks(level, kind)
    losses = []
    for step in range(3):
        batches = _inputs(step)[dist.get_rank()] if sharded else _inputs(step).transpose(0, 1).flatten(1, 2)

        def closure(batches: torch.Tensor = batches) -> torch.Tensor:
            if clears:
                optimizer.zero_grad()
            found = [model(batch).square().mean() for batch in batches]
            for loss in found:
                loss.backward()
            return torch.stack(found).sum().detach()

        loss = optimizer.step(closure)
        optimizer.zero_grad()
        if sharded:
            dist.all_reduce(loss)
            loss /= WORLD
        losses.append(float(loss))
    with nullcontext() if sharded is None else sharded.full_parameters():
        return losses, _flat(model).copy()


@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize(
    ("kind", "clears"),
    [(torch.optim.SGD, False), (torch.optim.SGD, True), (megalight.optim.Adam, True), (Twice, True)],
    ids=["sgd", "sgd-clears", "adam", "twice"],
)
def test_gradients_of_closures_are_those_of_the_step(level: str, kind: Any, clears: bool) -> None:
    plain = torch.optim.AdamW if kind is megalight.optim.Adam else kind
    losses, weights = _closures(plain, None, clears)
    for found in run(_closures, WORLD, kind, level, clears):
        np.testing.assert_allclose(found[0], losses, rtol=1e-9)
        np.testing.assert_allclose(found[1], weights, rtol=1e-9)


def _late(level: str) -> str:
    model, _, sharded = _blocks(level)
    x = _inputs(0)[0, 0]
    model(x).sum().backward()
    sharded.clip_grad_norm_(1.0)
    with pytest.raises(MegalightError) as told:
        model[:3](x).sum().backward()
    return str(told.value)


@pytest.mark.parametrize("level", ["optim", "optim_grads", "optim_grads_params"])
def test_gradients_after_the_reduction_are_refused(level: str) -> None:
    for told in run(_late, WORLD, level):
        assert "zero_grad()" in told


def _normed(level: str | None, broadcast: bool = True) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Weights and buffers with batch norms, of torch's ``DistributedDataParallel`` without a level."""
    torch.manual_seed(4)
    model: Any = nn.Sequential(*(Pair(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(3))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = None
    if level is None:
        call = nn.parallel.DistributedDataParallel(model)
    else:
        options = DataParallelOptions(level=level, units=("Pair",))  # type: ignore[arg-type]
        sharded = megalight.fully_shard(model, optimizer, data_parallel=options, broadcast_buffers=broadcast)
        call = model
    for step in range(3):
        call(_inputs(step)[dist.get_rank(), 0] + dist.get_rank()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with sharded.full_parameters() if sharded else nullcontext():
        return _flat(model).copy(), torch.cat([b.double().reshape(-1) for b in model.buffers()]).numpy()


def test_buffers_are_those_of_the_first_rank_as_under_ddp() -> None:
    weights, buffers = run(_normed, WORLD, None)[0]
    for level in ("optim", "optim_grads_params"):
        for found in run(_normed, WORLD, level):
            np.testing.assert_allclose(found[0], weights, rtol=1e-9)
            np.testing.assert_allclose(found[1], buffers, rtol=1e-9)
    first, second = run(_normed, WORLD, "optim", False)
    np.testing.assert_allclose(first[1], buffers, rtol=1e-9)
    assert not np.allclose(second[1], buffers)


def _penalized(level: str | None, whole: bool = False, bare: bool = False) -> np.ndarray[Any, Any]:
    """A loss with the norm of its gradient by the inputs, or that norm alone (``bare``).

    Physics-informed models and critics have such losses.
    """
    model, optimizer, sharded = _blocks(level)
    for step in range(3):
        with sharded.full_parameters() if sharded and whole else nullcontext():
            for x in _inputs(step)[:, 0] if sharded is None else _inputs(step)[None, dist.get_rank(), 0]:
                x.requires_grad_()
                loss = model(x).square().mean()
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                (slope.square().sum() + (0 if bare else loss)).div(1 if sharded else WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    with sharded.full_parameters() if sharded else nullcontext():
        return _flat(model).copy()


@pytest.mark.parametrize(("level", "whole"), [("optim", False), ("optim_grads", False), ("optim_grads_params", True)])
@pytest.mark.parametrize("bare", [False, True])
def test_gradients_of_gradients_are_right_where_parameters_are_whole(level: str, whole: bool, bare: bool) -> None:
    weights = _penalized(None, False, bare)
    for found in run(_penalized, WORLD, level, whole, bare):
        np.testing.assert_allclose(found, weights, rtol=1e-9)


def _penalty_refused() -> str:
    with pytest.raises(MegalightError) as refused:
        _penalized("optim_grads_params")
    return str(refused.value)


def test_gradients_of_gradients_are_refused_where_parameters_come_and_go() -> None:
    for told in run(_penalty_refused, WORLD):
        assert "create_graph=True reached Pair, whose parameters are sharded" in told
    alone = [run(_penalized, 1, level)[0] for level in ("optim", "optim_grads_params")]
    np.testing.assert_allclose(alone[1], alone[0], rtol=1e-9)


def _from_meta(level: str) -> tuple[list[float], np.ndarray[Any, Any], int]:
    with torch.device("meta"):
        model = llama(6, 2, tied=False)
    options = DataParallelOptions(level=level)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sharded = megalight.fully_shard(model, optimizer, data_parallel=options, dtype=torch.bfloat16, seed=5)
    with sharded.full_parameters():
        initial = torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).numpy()
    return _steps(sharded, model, range(2))[0], initial, sharded.engine.memory()["parameters"]


def test_a_model_on_the_meta_device_is_drawn_into_shards() -> None:
    """The values are those of one device, whatever is sharded."""
    (alone,) = run(_alone, 1)
    full, grads = run(_from_meta, WORLD, "optim_grads_params"), run(_from_meta, WORLD, "optim_grads")
    for (losses, initial, size), (others, _, whole) in zip(full, grads, strict=True):
        assert losses == others
        assert np.array_equal(initial, alone)
        assert size < whole


def _alone() -> np.ndarray[Any, Any]:
    with torch.device("meta"):
        model = llama(6, 2, tied=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    megalight.fully_shard(model, optimizer, dtype=torch.bfloat16, seed=5)
    found: np.ndarray[Any, Any] = torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).numpy()
    return found


def test_splits_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"splits no module; use megalight\.parallelize"):
        megalight.fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1), ParallelMesh(2, 0, tp=2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Stack(nn.Module):
    """Blocks in ways that scripts have: as lists of parts, with named inputs that they return too, recomputed."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.rows = nn.Embedding(7, 6, sparse=True) if way == "sparse" else None
        if way == "lists":
            self.layers = nn.ModuleList(nn.ModuleList([Block(), nn.Linear(6, 6)]) for _ in range(2))
        else:
            self.layers = nn.ModuleList((Passing if way == "passing" else Block)() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows is not None:
            x = x + self.rows((x > 0).sum(-1))
        if self.way == "lists":
            for first, second in self.layers:  # type: ignore[misc]
                x = second(first(x))
            return x
        if self.way == "passing":
            earlier = torch.zeros_like(x)
            for layer in self.layers:
                found = layer(x=x)
                x, earlier = found["x"], earlier + found["before"]
            return x + earlier
        every = 2 if self.way == "pairs" else 4
        for start in range(0, 4, every):
            x = checkpoint(self._some, start, start + every, x, use_reentrant=False)
        return x

    def _some(self, start: int, stop: int, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[start:stop]:  # type: ignore[index]
            x = checkpoint(layer, x, use_reentrant=False) if self.way == "nested" else layer(x)
        return x


class Passing(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return {"x": super().forward(x), "before": x}


def _stack(way: str, level: str) -> np.ndarray[Any, Any]:
    torch.manual_seed(0)
    model = Stack(way).double()
    if model.rows is not None and level == "alone":
        model.rows.sparse = False  # which AdamW of torch refuses
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if level == "alone":
        sharded, rank, world = None, 0, 1
    else:
        sharded = megalight.fully_shard(model, optimizer, data_parallel=DataParallelOptions(level=level))  # type: ignore[arg-type]
        rank, world = dist.get_rank(), dist.get_world_size()
    draws = torch.Generator().manual_seed(1)
    for _ in range(2):
        x = torch.randn(4, 6, generator=draws, dtype=torch.float64).requires_grad_()
        model(x.chunk(world)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if sharded is None:
        return _flat(model).copy()
    with sharded.full_parameters():
        return _flat(model).copy()


@pytest.mark.parametrize("level", ["optim_grads_params", "optim_grads"])
@pytest.mark.parametrize("way", ["lists", "passing", "pairs", "all", "nested", "sparse"])
def test_blocks_train_as_on_one_device_however_they_are_called(way: str, level: str) -> None:
    expected = _stack(way, "alone")
    for found in run(_stack, WORLD, way, level):
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def _on(shape: tuple[int, ...] | None) -> tuple[int, np.ndarray[Any, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)]).double()
    model[0].norm.requires_grad_(False)
    mesh = None if shape is None else init_device_mesh("cpu", shape)
    sharded = megalight.fully_shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), mesh)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.randn(2, 6, generator=draws, dtype=torch.float64)).square().mean().backward()
        sharded.optimizer.step()
    with sharded.full_parameters():
        return sharded.engine.options.replicate, _flat(model)


def test_a_device_mesh_of_torch() -> None:
    """One dim of shards, or replicas of shards; some parameters are frozen."""
    expected = run(_on, 4, None)
    for shape, replicas in (((4,), 1), ((2, 2), 2)):
        for (found, weights), (_, others) in zip(run(_on, 4, shape), expected, strict=True):
            assert found == replicas
            np.testing.assert_allclose(weights, others, rtol=1e-12)


def _refused_meshes() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for mesh, options, message in (
        (init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), {}, r"\{'dp': 1, 'tp': 2\}, and splits no"),
        (init_device_mesh("cpu", (1, 1, 2)), {}, "splits no module"),
        (DeviceMesh("cpu", [1, 0]), {}, r"over ranks \[1, 0\], and there are 2"),
        (
            DeviceMesh("cpu", [[0], [1]]),
            {"data_parallel": DataParallelOptions(replicate=4)},
            "replicate=4, and the DeviceMesh",
        ),
    ):
        with pytest.raises(ConfigurationError, match=message):
            megalight.fully_shard(model, optimizer, mesh, **options)  # type: ignore[arg-type]


def test_meshes_that_do_not_fit_are_refused() -> None:
    run(_refused_meshes, WORLD)


class Halves(Stack):
    """Each of its steps uses two of its four blocks, and the last one is frozen in the second step."""

    def forward(self, x: torch.Tensor, step: int = 0) -> torch.Tensor:
        self.layers[3].requires_grad_(step != 1)
        for layer in list(self.layers)[step % 2 :: 2]:
            x = layer(x)
        return x


def _halves(level: str | None) -> np.ndarray[Any, Any]:
    torch.manual_seed(3)
    model = Halves("").double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sharded = (
        None
        if level is None
        else megalight.fully_shard(model, optimizer, data_parallel=DataParallelOptions(level=level))
    )  # type: ignore[arg-type]
    for step in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x, step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if sharded is None:
        return _flat(model)
    with sharded.full_parameters():
        return _flat(model)


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
def test_blocks_without_a_gradient_stay_as_in_torch(level: str) -> None:
    for found in run(_halves, 2, level):
        np.testing.assert_allclose(found, _halves(None), rtol=1e-9)
