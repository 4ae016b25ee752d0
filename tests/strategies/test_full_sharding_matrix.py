"""Every level of sharding, beside every layout and with any share of the optimizer on the host, equals one device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.models.gpt import GPTConfig
from megalight.nn.moe import MoEConfig
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.sharding import fully_shard
from tests.strategies.training import (
    CONFIGS,
    Gradients,
    assert_same_gradients,
    assert_same_run,
    by_hand,
    fit,
)
from tests.support.cover import pairwise
from tests.support.options import data_parallel
from tests.support.workers import run

GPT = replace(CONFIGS["tied"], num_layers=3)
"""Three layers between an embedding and a head that share a weight."""
MOE = replace(CONFIGS["gqa"], moe=MoEConfig(num_experts=4, ffn_hidden_size=12, pattern=(False, True)))
"""Experts in the last of two layers: stacks of three dims."""

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SHARES = (0.0, 0.5, 1.0)
"""Of masters and optimizer state in host memory."""
TP = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, GPTConfig, dict[str, Any]]] = {
    "dp2": (2, GPT, {}),
    "dp4": (4, GPT, {}),
    "hsdp": (4, GPT, {"replicate": 2}),
    "tp": (2, GPT, TP),
    "hsdp over both": (4, GPT, {"replicate": 2, "replicate_optimizer": False}),
    "replicas alone": (2, GPT, {"replicate": 2, "replicate_optimizer": False}),
    "tp hsdp over both": (8, GPT, {**TP, "replicate": 2, "replicate_optimizer": False}),
    "tp hsdp": (8, GPT, {**TP, "replicate": 2}),
    "tp dp": (4, GPT, TP),
    "cp": (2, GPT, {"context_parallel": 2, "context": ContextOptions(kind="ring")}),
    "cp dp": (4, GPT, {"context_parallel": 2, "context": ContextOptions(kind="all_gather")}),
    "experts": (2, MOE, {}),
    "ep": (2, MOE, {"expert_parallel": 2}),
    "ep edp": (4, MOE, {"expert_parallel": 2}),
    "tp ep": (4, MOE, {**TP, "expert_parallel": 2}),
    "ep hsdp": (4, MOE, {"expert_parallel": 2, "replicate": 2}),
    "ep hsdp over both": (4, MOE, {"expert_parallel": 2, "replicate": 2, "replicate_optimizer": False}),
    "tp ep hsdp": (8, MOE, {**TP, "expert_parallel": 2, "replicate": 2}),
    "recompute": (2, GPT, {"recompute": RecomputeOptions(granularity="full", num_layers=1)}),
    "accumulation": (2, GPT, {"micro_batch_size": 1, "reduce_each_micro_batch": False}),
}
"""Name -> ranks, model, options."""

FLAT = ("replicate", "replicate_optimizer", "reduce_each_micro_batch")
"""Options of data parallelism among these."""

COVER = [
    ("dp2", "no_shard", 1.0),
    ("hsdp", "optim", 1.0),
    ("tp", "optim_grads", 1.0),
    ("ep edp", "optim_grads", 0.5),
    ("hsdp over both", "optim_grads", 0.0),
    ("replicas alone", "optim", 0.0),
    ("ep hsdp over both", "optim_grads_params", 0.0),
    ("tp dp", "optim_grads_params", 1.0),
    ("cp", "optim_grads_params", 1.0),
    ("recompute", "optim_grads_params", 0.5),
    ("accumulation", "optim_grads_params", 1.0),
]
"""Each level, each layout that sums over several axes, and each share, in a few runs."""


ROWS = pairwise(
    (
        (layout, level, share)
        for (layout, (_, _, options)), level, share in itertools.product(LAYOUTS.items(), LEVELS, SHARES)
        if level != "no_shard" or "replicate" not in options  # refused: it has no shards to replicate
    ),
    COVER,
)


@functools.cache
def _expected(config: GPTConfig, micro_batch_size: int | None) -> dict[str, Any]:
    return by_hand(config, micro_batch_size=micro_batch_size)


def _trained(layout: str, level: str, share: float, **more: Any) -> dict[str, Any]:
    _, config, options = LAYOUTS[layout]
    options = dict(options)
    # These belong to the level where parameters are sharded, and say nothing on the others.
    every = {name: options.pop(name) for name in FLAT if name in options}
    if level != "optim_grads_params":
        every.pop("reduce_each_micro_batch", None)
    gradients = Gradients()
    data_parallel = {"level": level, "optimizer_offload_fraction": share, "bucket_size": 2000, **every, **more}
    found = fit(config, options=data_parallel, extra_callbacks=[gradients], **{"micro_batch_size": 1, **options})
    return {**found, "gradients": gradients.first}


@pytest.mark.parametrize(
    ("layout", "level", "share"), [pytest.param(*row, marks=[pytest.mark.full] * (row not in COVER)) for row in ROWS]
)
def test_equals_one_device(layout: str, level: str, share: float) -> None:
    world, config, _ = LAYOUTS[layout]
    expected = _expected(config, 1 if config is MOE else None)
    for found in run(_trained, world, layout, level, share):
        assert_same_run(found, expected)
        assert_same_gradients(found["gradients"], expected["gradients"])


class Odd(nn.Module):
    """A layer with parameters of one to four dims, of which some are frozen, shared with the next layer, or unused."""

    def __init__(self, before: Odd | None) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 5, 3, padding=1)
        self.row = nn.Conv1d(5, 3, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(2, 7, 3) / 3)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(4, 2))
        self.shared = nn.Parameter(torch.randn(7, 3) / 3) if before is None else before.shared

    def forward(self, x: Tensor) -> Tensor:
        """``[3, 5, 4] -> [3, 5, 4]``"""
        y = torch.tanh(self.image(x) + self.image(x.flip(2)))  # used twice
        z = self.row(y.transpose(0, 1)) + self.frozen[:, None]
        wide = torch.einsum("ncw,ehc->nehw", z, self.experts).tanh()
        return x + torch.einsum("nehw,hc->cnw", wide, self.shared)[:, :3].repeat_interleave(2, 1)[:, :5]


def _layers() -> nn.Sequential:
    torch.manual_seed(6)
    layers: list[Odd] = []
    for _ in range(3):
        layers.append(Odd(layers[0] if layers else None))
    return nn.Sequential(*layers).double()


def _images(step: int, world: int) -> Tensor:
    """``[ranks, passes, 3, 5, 4]``"""
    return torch.randn(world, 2, 3, 5, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _flat(model: nn.Module) -> list[float]:
    return list(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist())


def _odd(level: Any, share: float, replicate: int, both: bool) -> tuple[list[float], list[float]]:
    model, options = _layers(), {"replicate": replicate, "replicate_optimizer": not both}
    wanted = data_parallel(level=level, optimizer_offload_fraction=share, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sharded = fully_shard(model, optimizer, units=["Odd"], data_parallel=wanted)
    norms = []
    for step in range(3):
        for x in _images(step, dist.get_world_size())[dist.get_rank()]:
            model(x).square().sum().backward()
        norms.append(float(sharded.clip_grad_norm_(5.0)))
        optimizer.step()
        optimizer.zero_grad()
    with sharded.full_parameters():
        return norms, _flat(model)


def _every_odd(
    replicates: Sequence[tuple[int, bool]], shares: Sequence[float]
) -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    for level, share, (replicate, both) in itertools.product(LEVELS, shares, replicates):
        if level != "optim" and (level != "no_shard" or replicate == 1):  # "optim" stands for the default there
            found[f"{level} {share} {replicate} {both}"] = _odd(level, share, replicate, both)
    return found


@pytest.mark.parametrize(
    ("world", "replicates", "shares"),
    [
        (2, [(1, False)], SHARES[1:2]),
        pytest.param(2, [(1, False)], SHARES, marks=pytest.mark.full),
        pytest.param(4, [(1, False), (2, False), (2, True)], SHARES, marks=pytest.mark.full),
    ],
)
def test_parameters_of_any_kind(world: int, replicates: list[tuple[int, bool]], shares: tuple[float, ...]) -> None:
    model, norms = _layers(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        for x in _images(step, world).flatten(0, 1):
            (model(x).square().sum() / world).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 5.0)))
        optimizer.step()
    expected = torch.tensor(_flat(model))
    for rank in run(_every_odd, world, replicates, shares):
        for name, (found, weights) in rank.items():
            assert found == pytest.approx(norms, rel=1e-9), name
            assert float((torch.tensor(weights) - expected).norm() / expected.norm()) <= 1e-9, name
