"""A run that is stopped and resumed, under the same or another layout, goes on as if nothing had happened."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight.strategies import DataParallelOptions, MegatronStrategy
from megalight.strategies.checkpoints import CheckpointOptions
from tests.strategies.regression import Plain, batches, samples, weights
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED, Losses, WithData, gathered
from tests.support.environment import trainer
from tests.support.workers import run

STEPS = 4


def _rank(
    folder: str, layout: dict[str, Any], stop: int, resume: str | None, config: str, precision: str, every: int = 1
) -> tuple[list[float], dict[str, Any]]:
    level = layout.get("level", "optim")
    options = {key: value for key, value in layout.items() if key != "level"}
    strategy = MegatronStrategy(micro_batch_size=1, data_parallel=DataParallelOptions(level=level), **options)
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
        pytest.param(1, "64-true", marks=pytest.mark.full),
        pytest.param(2, "bf16-true", marks=pytest.mark.full),
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
SOME = [(CHANGES[3], "gpt2")]
"""The level of data parallelism changes; test_layout_changes.py has other layouts."""


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


class Scheduled(Plain):
    """A plain module whose optimizer and schedule are arguments."""

    def __init__(self, kind: str, schedule: str | None, options: dict[str, Any], rates: dict[str, Any]) -> None:
        super().__init__()
        self.double()
        self.kind, self.schedule, self.options, self.rates = kind, schedule, options, rates

    def configure_optimizers(self) -> Any:
        optimizer = getattr(torch.optim, self.kind)(self.parameters(), **self.options)
        if self.schedule is None:
            return optimizer
        scheduler = getattr(torch.optim.lr_scheduler, self.schedule)(optimizer, **self.rates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _changed(folder: str, before: tuple[Any, ...], after: tuple[Any, ...], which: str | None) -> dict[str, Any]:
    def part(arguments: tuple[Any, ...], steps: int, choice: str | None, resume: str | None) -> Any:
        how = MegatronStrategy(checkpoints=CheckpointOptions(resume_optimizer=choice))  # type: ignore[arg-type]
        runner = trainer(how, max_steps=steps, limit_val_batches=0)
        module = Scheduled(*arguments)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            runner.fit(module, batches(STEPS * 4, 4 // runner.world_size), ckpt_path=resume)
        runner.save_checkpoint(f"{folder}/{steps}.ckpt")
        (group,) = runner.optimizers[0].param_groups
        said = [str(each.message) for each in told if "hyperparameters" in str(each.message)]
        return weights(module), {name: group[name] for name in ("lr", "weight_decay")}, said

    part(before, 2, None, None)
    return dict(zip(("weights", "group", "said"), part(after, STEPS, which, f"{folder}/2.ckpt"), strict=True))


def _by_hand(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[list[float]]:
    """The same in torch alone: moments go on, and hyperparameters and rates are those of ``after``."""
    module = Scheduled(*before)
    found: list[Any] = []
    for arguments, steps in ((before, range(2)), (after, range(2, STEPS))):
        module.kind, module.schedule, module.options, module.rates = arguments
        made = module.configure_optimizers()
        optimizer = made["optimizer"] if isinstance(made, dict) else made
        scheduler = made["lr_scheduler"]["scheduler"] if isinstance(made, dict) else None
        module.zero_grad()
        for _ in range(steps.start if scheduler else 0):
            optimizer.step()  # without gradients
            scheduler.step()
        if found:
            optimizer.state.update(found[0].state)
        found.append(optimizer)
        for step in range(2):  # a plain loader begins anew
            x, y = samples(STEPS * 4)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(module(x[4 * step : 4 * step + 4]), y[4 * step : 4 * step + 4]).backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
    return weights(module)


ADAMW = {"lr": 0.02, "weight_decay": 0.1}
OTHERS = {"lr": 0.005, "weight_decay": 0.3, "betas": (0.5, 0.7), "eps": 1e-3}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("AdamW", None, ADAMW, {}), ("AdamW", None, OTHERS, {})),
        (("AdamW", "StepLR", ADAMW, {"step_size": 1}), ("AdamW", "StepLR", OTHERS, {"step_size": 3})),
        (("AdamW", "CosineAnnealingWarmRestarts", ADAMW, {"T_0": 3}),) * 2,
        (("AdamW", "CosineAnnealingWarmRestarts", ADAMW, {"T_0": 3}), ("AdamW", "StepLR", ADAMW, {"step_size": 3})),
        (("Adafactor", "ExponentialLR", {"lr": 0.02}, {"gamma": 0.5}), ("Adafactor", None, {"lr": 0.01}, {})),
    ],
    ids=["options", "schedule", "nothing", "kind", "whole parameters"],
)
def test_what_is_configured_now_wins(tmp_path: Path, before: Any, after: Any) -> None:
    for found in run(_changed, 1, str(tmp_path), before, after, "configured"):
        for ours, theirs in zip(found["weights"], _by_hand(before, after), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
        assert not found["said"]


def test_the_checkpoint_may_win_and_a_warning_names_the_difference(tmp_path: Path) -> None:
    before, after = ("AdamW", None, ADAMW, {}), ("AdamW", None, {**ADAMW, "lr": 0.005}, {})
    for which in ("saved", None):
        first, second = run(_changed, 2, str(tmp_path / str(which)), before, after, which)
        assert first["group"] == second["group"] == ADAMW
        assert (which is None) == any("lr 0.02 -> 0.005" in each for each in first["said"])
