"""The Trainer's own features and Lightning's callbacks under a pipeline: what they do to one device, they do here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelSummary,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger

from megalight.strategies import MegatronStrategy, PipelineOptions
from tests.strategies.training import ADAM, CONFIGS, SEED, WithData
from tests.support.environment import trainer
from tests.support.workers import run

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"pipeline_parallel": 2}),
    (4, {"pipeline_parallel": 2, "virtual_pipeline": 2, "pipeline": PipelineOptions(schedule="zero_bubble")}),
]


class Sums(pl.Callback):
    """A user's callback: reads weights and gradients, logs with ``sync_dist``."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        squares = [p.grad.square().sum() for p in pl_module.parameters() if p.grad is not None]
        assert squares
        pl_module.log("batch", torch.tensor(float(trainer.global_step)), sync_dist=True)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert all(bool(value.isfinite().all()) for value in pl_module.state_dict().values())


def callbacks(folder: str) -> list[pl.Callback]:
    return [
        Sums(),
        LearningRateMonitor(logging_interval="step"),
        ModelSummary(max_depth=2),
        Timer(duration="00:01:00:00", verbose=False),
        DeviceStatsMonitor(cpu_stats=True),
        LambdaCallback(on_train_batch_end=lambda trainer, *args: trainer.strategy.barrier()),
    ]


CASES: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate_grad_batches": 2, "max_steps": 3},
    "scheduler": {
        "callbacks": lambda folder: [GradientAccumulationScheduler({0: 1, 1: 3})],
        "max_epochs": 2,
        "max_steps": -1,
    },
    "callbacks": {"callbacks": callbacks, "logger": CSVLogger, "log_every_n_steps": 1},
    "clip by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "dry": {"fast_dev_run": 2},
    "sanity": {"num_sanity_val_steps": 2, "check_val_every_n_epoch": 1, "max_epochs": 2, "max_steps": -1},
    "few batches": {"overfit_batches": 2, "max_epochs": 3, "max_steps": -1},
    "profiled": {"profiler": "simple", "detect_anomaly": True},
    "bare": {"barebones": True, "num_sanity_val_steps": None, "log_every_n_steps": None},
}


def _fit(case: str, layers: int, options: dict[str, Any], folder: str) -> dict[str, float]:
    module = WithData(replace(CONFIGS["tied"], num_layers=layers), optimizer=ADAM, seed=SEED)
    module.steps = 6 if case == "accumulate" else 3
    settings = {name: value(folder) if callable(value) else value for name, value in CASES[case].items()}
    runner = trainer(
        MegatronStrategy(micro_batch_size=1, **options), root=folder, **{"use_distributed_sampler": False, **settings}
    )
    runner.fit(module)
    report = runner.strategy.report
    assert report is not None
    return {"loss": float(report.loss), "steps": runner.global_step, "tokens": float(report.num_tokens)}


@pytest.mark.parametrize("layout", [LAYOUTS[0], pytest.param(LAYOUTS[1], marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case in ("dry", "profiled"))) for case in CASES]
)
def test_the_trainer_does_what_it_does_on_one_device(
    case: str, layout: tuple[int, dict[str, Any]], tmp_path: Path
) -> None:
    ranks, options = layout
    layers = 2 * options.get("virtual_pipeline", 1)
    (expected,) = run(_fit, 1, case, layers, {}, str(tmp_path))
    for found in run(_fit, ranks, case, layers, options, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-9)
