"""Runs with Adam's moments in 16 and 8 bits go on bit by bit from every format of checkpoint, wherever moments lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight import checkpoint
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.strategies import CheckpointOptions, MegatronFSDPStrategy, MegatronStrategy
from tests.strategies.training import ADAM, BASE, SEED, WithData
from tests.support.environment import trainer
from tests.support.workers import run

HALF, STEPS = 2, 4
Strategy = MegatronStrategy | MegatronFSDPStrategy


def _strategy(kind: str, fraction: float, saves: CheckpointOptions) -> Strategy:
    shared = DataParallelOptions(optimizer_offload_fraction=fraction)
    if kind == "fsdp":
        return MegatronFSDPStrategy(data_parallel=shared, micro_batch_size=2, checkpoints=saves)
    layout: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True} if kind == "tp" else {}
    return MegatronStrategy(data_parallel=shared, micro_batch_size=2, checkpoints=saves, **layout)


def _fit(strategy: Strategy, moments: tuple[str, str], steps: int, path: str | None) -> tuple[Any, dict[str, Tensor]]:
    adam = replace(ADAM, exp_avg_dtype=moments[0], exp_avg_sq_dtype=moments[1])  # type: ignore[arg-type]
    module = WithData(BASE, optimizer=adam, seed=SEED)
    module.steps = STEPS
    options: dict[str, Any] = {"max_steps": steps, "limit_val_batches": 0, "use_distributed_sampler": False}
    runner = trainer(strategy, precision="bf16-mixed", gradient_clip_val=1.0, **options)
    runner.fit(module, ckpt_path=path)
    strategy.sync_parameters()
    assert strategy.parallel_model is not None
    with strategy.parallel_model.full_parameters():
        return runner, {name: p.detach().clone() for name, p in module.model.named_parameters()}


def _resumed(kind: str, moments: tuple[str, str], folder: str, saves: CheckpointOptions) -> tuple[bool, bool]:
    """Whether a run that went on elsewhere has the weights of one that never stopped; whether it moved at all."""
    _, straight = _fit(_strategy(kind, 0.0, saves), moments, STEPS, None)
    runner, half = _fit(_strategy(kind, 0.0, saves), moments, HALF, None)
    runner.save_checkpoint(folder)
    runner.strategy.teardown()
    _, resumed = _fit(_strategy(kind, 1.0, saves), moments, STEPS, folder)
    same = all(torch.equal(resumed[name], value) for name, value in straight.items())
    return same, any(not torch.equal(half[name], value) for name, value in straight.items())


BF16, FP8 = ("bfloat16", "float8"), ("float8", "float8")
HALVES = [
    ("dp", CheckpointOptions(format="dp_reshardable"), BF16),
    ("tp", CheckpointOptions(format="fully_reshardable"), FP8),
    ("fsdp", CheckpointOptions(format="fsdp_dtensor"), FP8),
    ("fsdp", CheckpointOptions(format="fully_reshardable", async_save="per_save"), BF16),
]
"""Sharding, format, and dtypes of moments; the same with the other dtypes in whole test runs."""
OTHERS = [(kind, saves, FP8 if moments is BF16 else BF16) for kind, saves, moments in HALVES]


@pytest.mark.parametrize(
    ("kind", "saves", "moments"),
    [*HALVES[::2], *(pytest.param(*each, marks=pytest.mark.full) for each in HALVES[1::2] + OTHERS)],
)
def test_a_run_goes_on_with_its_moments_on_the_host(
    kind: str, saves: CheckpointOptions, moments: tuple[str, str], tmp_path: Path
) -> None:
    path = str(tmp_path / "half")
    for same, moved in run(_resumed, 2, kind, moments, path, saves):
        assert moved
        assert same
    stored = {
        tensor.dtype for name, tensor in checkpoint.open(path).tensors.items() if name.startswith("optimizer.exp_avg")
    }
    assert stored == {"bfloat16"}
