"""``self.log`` inside the steps of a micro-batch: with a pipeline as without one, on every rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import MeanMetric

from megalight.errors import ConfigurationError
from megalight.models.module import Carry
from megalight.strategies import MegatronStrategy
from megalight.strategies.stage_logs import StageLogs
from megalight.types import Loss
from tests.strategies.toy import Kept, ToyModule
from tests.support.environment import trainer
from tests.support.workers import run


class Logs(ToyModule):
    """Logs on the first stage, on all of them, on the last one, and not in every step."""

    def forward_step(self, model: nn.Module, batch: dict[str, Tensor], carry: Carry | None = None) -> Carry:
        if carry is None:
            self.log("rows", len(batch["x"]), reduce_fx="sum", on_step=False, on_epoch=True)
        output = super().forward_step(model, batch, carry)
        self.log("hidden", output["hidden"].mean(), batch_size=3, on_epoch=True)
        return output

    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss_step(carry, batch)
        self.log_dict({"least": carry["hidden"].min(), "largest": carry["hidden"].max()}, on_epoch=True)
        if self.global_step % 2 == 0:
            self.log("even", loss.sum, sync_dist=True)
        return loss


class LogsLosses(Logs):
    """Logs on the last stage alone."""

    forward_step = ToyModule.forward_step  # type: ignore[assignment]


def _logged(kind: type[Logs], folder: str, options: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, float]]:
    kept, best = Kept(), ModelCheckpoint(folder, "{step}", monitor="least_epoch", save_top_k=1)
    early = EarlyStopping("even", patience=0, mode="max", check_on_train_epoch_end=True)
    runner = trainer(
        MegatronStrategy(micro_batch_size=1, **options),
        callbacks=[kept, best, early],
        enable_checkpointing=True,
        max_epochs=2,
        max_steps=-1,
        use_distributed_sampler=False,
    )
    runner.fit(kind())
    assert Path(best.best_model_path).exists()
    return kept.seen, {name: float(value) for name, value in runner.callback_metrics.items()}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(Logs, {}, marks=pytest.mark.full),
        pytest.param(Logs, {"virtual_pipeline": 2}, marks=pytest.mark.full),
        (LogsLosses, {"virtual_pipeline": 2}),
    ],
)
def test_values_of_all_stages_are_logged_on_all_ranks(
    tmp_path: Path, kind: type[Logs], options: dict[str, Any]
) -> None:
    ((seen, final),) = run(_logged, 1, kind, str(tmp_path / "one"), {})
    for steps, last in run(_logged, 2, kind, str(tmp_path / "two"), {"pipeline_parallel": 2, **options}):
        assert last == pytest.approx(final, rel=1e-9)
        for step, expected in zip(steps, seen, strict=True):
            assert step == pytest.approx(expected, rel=1e-9)


class Later(ToyModule):
    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        if self.global_step:
            self.log("late", 1.0)
        return super().loss_step(carry, batch)


def _later() -> None:
    trainer(MegatronStrategy(pipeline_parallel=2, micro_batch_size=2), limit_val_batches=0).fit(Later())


def test_steps_that_log_later_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"the step logs 'late' by self\.log, and the first step"):
        run(_later, 2)


def unshared() -> StageLogs:
    """Make what shares the values of the first of two ranks, and never does."""
    group: Any = object()
    step: Any = SimpleNamespace(running=0)
    return StageLogs([[0, 1]], 0, lambda: group, lambda: None, torch.device("cpu"), step)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (MeanMetric(), "the step logs the metric 'x', a MeanMetric, by self.log: only ranks with that part of the mo"),
        (torch.zeros(3), r"the step logs 'x' by self.log, and its value is a tensor of shape \(3,\)\. Log a number"),
        ({"a": 1.0}, r"the step logs 'x' by self.log, and its value is a dict\. Log a number"),
    ],
)
def test_values_that_cannot_be_shared_are_refused(value: Any, message: str) -> None:
    module, logs = pl.LightningModule(), unshared()
    with pytest.raises(ConfigurationError, match=message), logs.shared(module, "train"):
        module.log("x", value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"reduce_fx": lambda values: values[0]},
            "reduce_fx=<lambda>, and Lightning reduces by 'mean', 'sum', 'min' o",
        ),
        (
            {"sync_dist": True, "sync_dist_group": object()},
            "the step logs 'x' by self.log with sync_dist_group, and ran",
        ),
    ],
)
def test_options_that_other_stages_cannot_have_are_refused(options: dict[str, Any], message: str) -> None:
    module, logs = pl.LightningModule(), unshared()
    with pytest.raises(ConfigurationError, match=message), logs.shared(module, "train"):
        module.log("x", 1.0, **options)


class Reduces(ToyModule):
    """Logs with a function as its reduction."""

    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        self.log("most", carry["hidden"].max(), reduce_fx=torch.max, on_step=False, on_epoch=True)
        return super().loss_step(carry, batch)


def test_functions_of_lightning_reduce_on_all_stages() -> None:
    (alone,) = run(_most, 1, {})
    assert run(_most, 2, {"pipeline_parallel": 2}) == pytest.approx([alone, alone], rel=1e-9)


def _most(options: dict[str, Any]) -> float:
    runner = trainer(MegatronStrategy(micro_batch_size=1, **options), max_steps=-1, max_epochs=1, limit_val_batches=0)
    runner.fit(Reduces())
    return float(runner.callback_metrics["most"])
