"""A run that is stopped and resumed, under the same or another layout, goes on as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight.strategies import DataParallel, MegatronStrategy
from tests.environment import trainer
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED, Losses, WithData, gathered
from tests.workers import run

STEPS = 4


def _rank(
    folder: str, layout: dict[str, Any], stop: int, resume: str | None, config: str, precision: str, every: int = 1
) -> tuple[list[float], dict[str, Any]]:
    level = layout.get("level", "optim")
    options = {key: value for key, value in layout.items() if key != "level"}
    strategy = MegatronStrategy(micro_batch_size=1, data_parallel=DataParallel(level=level), **options)
    losses = Losses()
    save = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=every, save_top_k=-1, save_last=True)
    module = WithData(CONFIGS[config], optimizer=ADAM, seed=SEED)
    module.steps = STEPS
    runner: pl.Trainer = trainer(
        strategy,
        callbacks=[losses, save],
        enable_checkpointing=True,
        max_steps=stop,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
        precision=precision,
    )
    runner.fit(module, ckpt_path=resume)
    return losses.losses, gathered(strategy, module)


def ranks(layout: dict[str, Any], data: int, *args: Any) -> tuple[list[float], dict[str, Any]]:
    found = run(_rank, layout.get("tensor_parallel", 1) * data, *args, timeout=240)
    return found[0]


@pytest.mark.parametrize(
    ("data", "precision"),
    [
        (1, "64-true"),
        (2, "bf16-true"),
        pytest.param(1, "bf16-true", marks=pytest.mark.full),
        pytest.param(2, "64-true", marks=pytest.mark.full),
    ],
)
def test_the_same_layout_resumes_bit_for_bit(tmp_path: Path, data: int, precision: str) -> None:
    layout = {"tensor_parallel": 2, "sequence_parallel": True}
    at = random.Random(data).randrange(1, STEPS)
    whole = ranks(layout, data, str(tmp_path / "a"), layout, STEPS, None, "tied", precision, at)
    path = str(tmp_path / "a" / f"step={at}.ckpt")
    losses, final = ranks(layout, data, str(tmp_path / "b"), layout, STEPS, path, "tied", precision, STEPS)
    assert losses == whole[0][at:]
    for name, value in whole[1].items():
        assert np.array_equal(final[name], value), name


CHANGES = [
    (({"tensor_parallel": 2, "sequence_parallel": True}, 1), ({}, 1)),
    (({}, 2), ({"tensor_parallel": 4, "level": "no_shard"}, 1)),
    (({"tensor_parallel": 4, "sequence_parallel": True}, 1), ({"tensor_parallel": 2}, 2)),
    (({"level": "no_shard"}, 1), ({}, 2)),
]


EVERY = [(change, config) for change in CHANGES for config in ("gqa", "gpt2")]
SOME = [(change, ("gqa", "gpt2")[index % 2]) for index, change in enumerate(CHANGES) if index != 2]
"""Every change once, but between two degrees of tensor parallelism, and both models."""


@pytest.mark.parametrize(
    ("change", "config"),
    [case if case in SOME else pytest.param(*case, marks=pytest.mark.full) for case in EVERY],
    ids=lambda part: part if isinstance(part, str) else " to ".join(map(str, part)),
)
def test_another_layout_goes_on_with_the_same_losses(tmp_path: Path, change: Any, config: str) -> None:
    (before, data), (after, data_after) = change
    whole = ranks(before, data, str(tmp_path / "a"), before, STEPS, None, config, "64-true", 2)
    path = str(tmp_path / "a" / "step=2.ckpt")
    losses, final = ranks(after, data_after, str(tmp_path / "b"), after, STEPS, path, config, "64-true", STEPS)
    np.testing.assert_allclose(losses, whole[0][2:], rtol=1e-9)
    for name, value in whole[1].items():
        error = np.linalg.norm(final[name] - value) / max(float(np.linalg.norm(value)), 1e-3)
        assert error <= 1e-9, f"{name} differs by {error:.2e}"


def test_last_is_found_and_bf16_masters_move_to_float32(tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks({}, 2, folder, {}, 2, None, "gqa", "bf16-true")
    losses, _ = ranks({}, 1, folder, {}, STEPS, "last", "gqa", "32-true")
    assert len(losses) == 2
