"""Validation, prediction and the callbacks that act on them, where the model or its sequences are cut."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from megalight import checkpoint
from megalight.callbacks import EMA, Throughput
from megalight.strategies import MegatronStrategy
from megalight.types import Loss, TokenBatch
from tests.callbacks.test_throughput import Rows
from tests.strategies.test_evaluation import Counting
from tests.strategies.training import ADAM, CONFIGS, SEED, global_batch
from tests.support.environment import trainer
from tests.support.workers import run

CONFIG = replace(CONFIGS["tied"], num_layers=4)
LAYOUTS: list[Any] = [
    (2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    (2, {"pipeline_parallel": 2, "virtual_pipeline": 2, "micro_batch_size": 3}),
    (2, {"context_parallel": 2, "micro_batch_size": 2}),
    pytest.param(4, {"pipeline_parallel": 2, "context_parallel": 2, "micro_batch_size": 1}, marks=pytest.mark.full),
]


class Uneven(Counting):
    """Two loaders; the first one's last batch is smaller, the second one's rows are shorter."""

    def __init__(self) -> None:
        super().__init__(CONFIG, optimizer=ADAM, seed=SEED)

    def loss_step(self, carry: Any, batch: TokenBatch) -> Loss:
        """Padding of cut sequences is outside the mask."""
        even = ((batch.tokens % 2 == 0) * batch.loss_mask).sum()
        return Loss(super().loss_step(carry, batch).sum, metrics={"even": (even, batch.loss_mask.sum())})

    def val_dataloader(self) -> Any:
        first: list[TokenBatch] = [global_batch(0), global_batch(1, rows=1)]
        second = [global_batch(2, rows=3, length=9)]
        return [DataLoader(batches, batch_size=None) for batches in (first, second)]  # type: ignore[arg-type]

    predict_dataloader = test_dataloader = val_dataloader


def _evaluate(options: dict[str, Any]) -> dict[str, Any]:
    module = Uneven()
    runner = trainer(MegatronStrategy(**options), use_distributed_sampler=False)
    runner.validate(module, verbose=False)
    validated = {name: float(value) for name, value in runner.callback_metrics.items()}
    runner.test(module, verbose=False)
    tested = {name: float(value) for name, value in runner.callback_metrics.items()}
    predicted = runner.predict(module)
    assert predicted is not None
    return {"val": validated, "test": tested, "predicted": [[b.numpy() for b in batches] for batches in predicted]}


@functools.cache
def evaluated_alone() -> dict[str, Any]:
    return dict(run(_evaluate, 1, {})[0])


@pytest.mark.parametrize(("ranks", "options"), LAYOUTS, ids=str)
def test_evaluation_is_that_of_one_device(ranks: int, options: dict[str, Any]) -> None:
    expected = evaluated_alone()
    assert set(expected["val"]) == {f"val_{name}/dataloader_idx_{i}" for name in ("loss", "even") for i in (0, 1)}
    for found in run(_evaluate, ranks, options):
        assert found["val"] == pytest.approx(expected["val"], rel=1e-9)
        assert found["test"] == pytest.approx(expected["test"], rel=1e-9)
        assert [len(batches) for batches in found["predicted"]] == [2, 1]
        for mine, theirs in zip(chain(*found["predicted"]), chain(*expected["predicted"]), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


class Saves(ModelCheckpoint):
    """Counts what it has saved."""

    saved = 0

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        self.saved += 1
        super()._save_checkpoint(trainer, filepath)


def _stopped(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Validate after every step; no later value counts as better, so the third one ends the run."""
    module = Counting(CONFIG, optimizer=ADAM, seed=SEED)
    module.steps = 8
    save = Saves(dirpath=folder, monitor="val_loss", filename="{step}-{val_loss:.4f}", save_top_k=2)
    stop = EarlyStopping(monitor="val_loss", patience=2, min_delta=100.0, check_on_train_epoch_end=False)
    runner = trainer(
        MegatronStrategy(**options),
        callbacks=[save, stop],
        enable_checkpointing=True,
        max_steps=8,
        val_check_interval=1,
        use_distributed_sampler=False,
    )
    runner.fit(module)
    return {
        "step": runner.global_step,
        "best": os.path.basename(save.best_model_path),
        "score": float(save.best_model_score),
        "saved": save.saved,
        "kept": sorted(os.path.basename(path) for path in save.best_k_models),
    }


def test_checkpoints_and_early_stopping_keep_all_ranks_in_step(tmp_path: Path) -> None:
    (expected,) = run(_stopped, 1, {}, str(tmp_path / "one"))
    assert expected["step"] == 3
    for number, (ranks, options) in enumerate(LAYOUTS[1:3]):
        folder = tmp_path / str(number)
        for found in run(_stopped, ranks, options, str(folder)):
            assert found == {**expected, "score": pytest.approx(expected["score"], rel=1e-9)}
        assert sorted(os.listdir(folder)) == expected["kept"]
        assert all(checkpoint.is_complete(folder / name) for name in expected["kept"])


def _averaged(options: dict[str, Any], path: str) -> tuple[float, float]:
    module = Counting(CONFIG, optimizer=ADAM, seed=SEED)
    runner = trainer(
        MegatronStrategy(**options), callbacks=[EMA(0.8)], val_check_interval=3, use_distributed_sampler=False
    )
    runner.fit(module)
    runner.save_checkpoint(path)
    return float(runner.callback_metrics["val_loss"]), float(runner.callback_metrics["train_loss"])


@pytest.mark.full
def test_a_moving_average_under_a_pipeline(tmp_path: Path) -> None:
    (expected,) = run(_averaged, 1, {}, str(tmp_path / "one.ckpt"))
    names = {name for name in checkpoint.open(tmp_path / "one.ckpt").tensors if name.startswith("ema.")}
    for ranks, options in ((2, LAYOUTS[1][1]), (4, LAYOUTS[0][1]), (2, LAYOUTS[2][1])):
        path = tmp_path / f"{ranks}-{'-'.join(options)}.ckpt"
        for found in run(_averaged, ranks, options, str(path)):
            assert found == pytest.approx(expected, rel=1e-9)
        tensors = checkpoint.open(path).tensors
        assert {name for name in tensors if name.startswith("ema.")} == names


def _throughput(options: dict[str, Any]) -> dict[str, float]:
    logger = Rows()
    module = Counting(CONFIG, optimizer=ADAM, seed=SEED)
    runner = trainer(
        MegatronStrategy(**options),
        callbacks=[Throughput(peak_tflops=1)],
        logger=logger,
        log_every_n_steps=3,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    runner.fit(module)
    if not runner.is_global_zero:
        return {}
    (row,) = [row for _, row in logger.rows if "tokens_per_s" in row]
    per_token = row["tflop_per_s_per_device"] * 1e12 / row["tokens_per_s_per_device"]
    share = row["tokens_per_s"] / row["tokens_per_s_per_device"]
    return {"tokens": row["tokens_per_s"] * row["step_time_s"], "flops": per_token, "devices": share}


@pytest.mark.parametrize(("ranks", "options"), [LAYOUTS[1], LAYOUTS[2], (4, LAYOUTS[0][1])], ids=str)
def test_throughput_counts_each_token_once_and_the_whole_model(ranks: int, options: dict[str, Any]) -> None:
    flops = Counting(CONFIG).flops_per_token(12)
    found = run(_throughput, ranks, options)[0]
    assert found == pytest.approx({"tokens": 4 * 12, "flops": flops, "devices": ranks})


def _one_module_many_trainers(options: dict[str, Any]) -> list[float]:
    """Fit, validate, fit on with the same trainer, then with another one: one split model all along."""
    module = Counting(CONFIG, optimizer=ADAM, seed=SEED)
    module.steps = 4
    first = trainer(MegatronStrategy(**options), max_steps=2, limit_val_batches=2, use_distributed_sampler=False)
    first.fit(module)
    model = module.model
    found = [float(first.callback_metrics["train_loss"]), first.validate(module, verbose=False)[0]["val_loss"]]
    first.fit_loop.epoch_loop.max_steps = 4
    first.fit(module)
    found.append(float(first.callback_metrics["train_loss"]))
    second = trainer(MegatronStrategy(**options), max_steps=2, use_distributed_sampler=False)
    found.append(second.validate(module, verbose=False)[0]["val_loss"])
    second.fit(module)
    found += [float(second.callback_metrics["train_loss"]), second.test(module, verbose=False)[0]["test_loss"]]
    assert module.model is model
    return found


@pytest.mark.full
def test_one_module_and_several_trainers() -> None:
    (expected,) = run(_one_module_many_trainers, 1, {})
    for ranks, options in (LAYOUTS[0], LAYOUTS[2], (4, LAYOUTS[1][1])):
        for found in run(_one_module_many_trainers, ranks, options):
            assert found == pytest.approx(expected, rel=1e-9), options
