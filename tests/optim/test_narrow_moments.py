"""Adam with moments in 16 and 8 bits: memory, state dicts, shards, masters in host memory, checkpoints."""

from __future__ import annotations

import functools
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megalight
from megalight.errors import ConfigurationError
from megalight.optim import Adam, AdamConfig, offload_to_cpu, restore_from_cpu, shard_optimizer
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions
from tests.parallel.data_parallel.helpers import accumulate, batches, infos, mesh
from tests.support.workers import run

STEPS = 4
KINDS = [("bfloat16", "bfloat16"), ("float8", "float8"), ("float8", "bfloat16"), ("float32", "float8")]
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float8": 1 + 1 / 64}
EACH = pytest.mark.parametrize("kinds", KINDS, ids="-".join)
SOME = pytest.mark.parametrize(
    "kinds", [*KINDS[:2], *(pytest.param(kinds, marks=pytest.mark.full) for kinds in KINDS[2:])], ids="-".join
)
"""Each format once: where moments go, each goes by itself."""


def _adam(params: Any, kinds: tuple[str, str], **options: Any) -> Adam:
    first, second = kinds
    return Adam(params, lr=0.01, exp_avg_dtype=first, exp_avg_sq_dtype=second, **options)  # type: ignore[arg-type]


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((9, 64), (130,), (3, 5))]


def _run(optimizer: Adam, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator) * torch.logspace(-3, 0, p.numel()).view(p.shape)
        optimizer.step()


def _equal(some: Any, others: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@EACH
def test_bytes_of_the_state(kinds: tuple[str, str]) -> None:
    param = nn.Parameter(torch.ones(64 * 50))
    optimizer = _adam([param], kinds)
    _run(optimizer, [param], range(1))
    held = sum(value.nbytes for value in optimizer.state[param].values() if value.ndim)
    assert held == sum(BYTES[kind] for kind in kinds) * param.numel()


@EACH
@pytest.mark.parametrize("capturable", [False, True])
def test_a_state_dict_goes_on_bit_by_bit(kinds: tuple[str, str], capturable: bool) -> None:
    whole, first, second = _parameters(), _parameters(), _parameters()
    straight, before = _adam(whole, kinds, capturable=capturable), _adam(first, kinds, capturable=capturable)
    _run(straight, whole, range(STEPS))
    _run(before, first, range(2))
    saved = before.state_dict()
    assert {str(value.dtype) for value in saved["state"][0].values()} <= {"torch.float32", "torch.bfloat16"}
    after = _adam(second, kinds, capturable=capturable)
    after.load_state_dict(saved)
    for new, old in zip(second, first, strict=True):
        new.data.copy_(old.data)
    _run(after, second, range(2, STEPS))
    assert _equal(second, whole)
    for new, old in zip(second, whole, strict=True):
        assert _equal(*([state[name] for name in sorted(state)] for state in (after.state[new], straight.state[old])))


@EACH
def test_state_of_torch_is_taken_over(kinds: tuple[str, str]) -> None:
    ours, theirs = _parameters(), _parameters()
    expected = torch.optim.AdamW(theirs, lr=0.01)
    _run(expected, theirs, range(2))  # type: ignore[arg-type]
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q.data)
    optimizer = _adam(ours, kinds)
    state = deepcopy(expected.state_dict())
    for group in state["param_groups"]:
        group["decoupled_weight_decay"] = True
    optimizer.load_state_dict(state)
    _run(optimizer, ours, range(2, 3))
    _run(expected, theirs, range(2, 3))  # type: ignore[arg-type]
    for p, q in zip(ours, theirs, strict=True):
        assert (p - q).detach().abs().max() < 0.15 * 0.01  # of an update, which is at most the learning rate
        assert float(optimizer.state[p]["step"]) == 3


@functools.cache
def _learned(kinds: tuple[str, str]) -> float:
    """The last loss of a regression."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 16))
    optimizer = _adam(model.parameters(), kinds, betas=(0.9, 0.999), weight_decay=0.0)
    target = torch.randn(16, 16)
    for step in range(300):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@SOME
def test_it_learns_as_with_moments_in_32_bits(kinds: tuple[str, str]) -> None:
    """With betas of 0.999, moments that were rounded to the nearest would stand still."""
    expected = _learned(("float32", "float32"))
    assert expected < 1.5  # it begins at about 16
    assert _learned(kinds) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("name", ["exp_avg_dtype", "exp_avg_sq_dtype"])
def test_other_formats_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} of Adam is 'int4'; it must be one of 'float32'"):
        Adam(_parameters(), **{name: "int4"})  # type: ignore[arg-type]


def test_the_recipe_passes_formats_on() -> None:
    model = nn.Linear(3, 3)
    config = AdamConfig(exp_avg_dtype="float8", exp_avg_sq_dtype="bfloat16")
    assert config.build(model.named_parameters())[0].moment_dtypes == ("float8", "bfloat16")


def _model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 70), nn.LayerNorm(70), nn.Tanh(), nn.Linear(70, 3)).bfloat16()


def _on_host(kinds: tuple[str, str]) -> None:
    """The same bits wherever masters and moments are, also after moments moved in the middle, and to another engine."""
    found: list[list[Tensor]] = []
    for fraction, move in ((0.0, False), (0.5, False), (1.0, False), (0.0, True), (1.0, True)):
        model = _model()
        optimizer = _adam(model.parameters(), kinds)
        options = DataParallelOptions(optimizer_offload_fraction=fraction, bucket_size=200)
        engine = DataParallelEngine(infos(model), mesh(), options)
        assert (len(engine.host.buckets) > 0) == (fraction > 0)
        assert (len(engine.host.buckets) < len(engine.buckets)) == (fraction < 1)
        shard_optimizer(optimizer, engine)
        for step in range(STEPS):
            if move and step == 2:
                offload_to_cpu(optimizer)
                restore_from_cpu(optimizer)
                engine.close()
                other = DataParallelEngine(
                    infos(model), mesh(), DataParallelOptions(optimizer_offload_fraction=1 - fraction, bucket_size=90)
                )
                engine.give_masters(other)
                shard_optimizer(optimizer, other)
                engine = other
            accumulate(engine, model, batches(step, dist.get_world_size(), 2, torch.bfloat16)[dist.get_rank()])
            optimizer.step()
            engine.publish()
        engine.sync_parameters()
        for bucket in engine.buckets:
            state = optimizer.state[bucket.shard.master]
            for name, kind in zip(("exp_avg", "exp_avg_sq"), kinds, strict=True):
                assert state[name].dtype == {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(
                    kind, torch.uint8
                )
        found.append([p.detach().clone() for p in model.parameters()])
    for others in found[1:]:
        assert _equal(found[0], others)


@SOME
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_host_gives_the_same_bits_as_the_device(kinds: tuple[str, str], world: int) -> None:
    run(_on_host, world, kinds)


def _sharded(kinds: tuple[str, str], fraction: float) -> Any:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, 24), nn.Sequential(*layers), nn.Linear(24, 8))
    optimizer = _adam(model.parameters(), kinds)
    options = DataParallelOptions(optimizer_offload_fraction=fraction)
    return model, optimizer, megalight.fully_shard(model, optimizer, units=["Sequential"], data_parallel=options)


def _trained(sharded: Any, model: nn.Module, optimizer: Adam, steps: range) -> list[Tensor]:
    for step in steps:
        # the same on all ranks: their mean has the same bits as each
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
    with sharded.full_parameters():
        return [p.detach().clone() for p in model.parameters()]


def _saving(kinds: tuple[str, str], fraction: float, path: str) -> list[Any]:
    model, optimizer, sharded = _sharded(kinds, fraction)
    _trained(sharded, model, optimizer, range(2))
    sharded.save(path)
    return [value.float().numpy() for value in _trained(sharded, model, optimizer, range(2, STEPS))]


def _loading(kinds: tuple[str, str], fraction: float, path: str) -> list[Any]:
    model, optimizer, sharded = _sharded(kinds, fraction)
    _trained(sharded, model, optimizer, range(1))  # state of its own, which must go
    sharded.load(path)
    return [value.float().numpy() for value in _trained(sharded, model, optimizer, range(2, STEPS))]


@SOME
@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (1.0, 0.0), pytest.param(0.5, 1.0, marks=pytest.mark.full)])
def test_saved_and_loaded_in_the_middle(kinds: tuple[str, str], before: float, after: float, tmp_path: Path) -> None:
    """On the device before and on the host afterwards, or the other way round, on other ranks: the same bits."""
    path = str(tmp_path / "run")
    expected = run(_saving, 2, kinds, before, path)[0]
    for world in (1, 2):
        for found in run(_loading, world, kinds, after, path):
            assert all((a == b).all() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("saved", "loaded"), list(product((("float32", "float32"), ("float8", "bfloat16")), repeat=2)))
def test_a_run_resumes_with_other_formats(saved: tuple[str, str], loaded: tuple[str, str], tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    expected = run(_saving, 1, saved, 0.0, path)[0]
    for found in run(_loading, 1, loaded, 0.0, path):
        apart = max(abs(a - b).max() for a, b in zip(found, expected, strict=True))
        assert apart < (1e-7 if saved == loaded else 0.02)
