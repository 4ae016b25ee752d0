"""``self.log`` inside the steps of a micro-batch: with a pipeline as without one, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import MeanMetric

from megalight.errors import ConfigurationError
from megalight.models.module import Carry
from megalight.parallel.mesh import ParallelMesh
from megalight.strategies import MegatronStrategy
from megalight.strategies.stage_logs import StageLogs
from megalight.types import Loss
from tests.environment import trainer
from tests.strategies.toy import Kept, ToyModule
from tests.workers import run


class Logs(ToyModule):
    """Logs on the first stage, on all of them, on the last one, and not in every step."""

    def forward_step(self, model: nn.Module, batch: dict[str, Tensor], carry: Carry | None = None) -> Carry:
        if carry is None:
            self.log("rows", len(batch["x"]), reduce_fx="sum", on_step=False, on_epoch=True)
        output = super().forward_step(model, batch, carry)
        self.log("hidden", output["hidden"].mean(), batch_size=3)
        return output

    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss_step(carry, batch)
        self.log_dict({"least": carry["hidden"].min(), "largest": carry["hidden"].max()}, on_epoch=True)
        if self.global_step % 2 == 0:
            self.log("even", loss.sum, sync_dist=True)
        return loss


class LogsLosses(Logs):
    """Logs on the last stage only."""

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


@pytest.mark.parametrize(("kind", "options"), [(Logs, {}), (LogsLosses, {"virtual_pipeline": 2})])
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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (MeanMetric(), "the step logs the metric 'x', a MeanMetric, by self.log: only one stage of the pipeline upd"),
        (torch.zeros(3), r"the step logs 'x' by self.log, and its value is a tensor of shape \(3,\)\. Log a number"),
        ({"a": 1.0}, r"the step logs 'x' by self.log, and its value is a dict\. Log a number"),
    ],
)
def test_values_that_cannot_be_shared_are_refused(value: Any, message: str) -> None:
    module, logs = pl.LightningModule(), StageLogs(ParallelMesh(2, 1, pp=2), torch.device("cpu"))
    with pytest.raises(ConfigurationError, match=message), logs.shared(module, "train"):
        module.log("x", value)
