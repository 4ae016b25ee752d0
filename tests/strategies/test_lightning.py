"""Lightning's own callbacks, checkpoints and schedules under MegatronStrategy."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from megalight.strategies import MegatronFSDPStrategy, MegatronStrategy
from tests.strategies.regression import Plain, batches, strategy, weights
from tests.strategies.training import ADAM, CONFIGS, SEED, WithData
from tests.support.environment import trainer
from tests.support.workers import run


def model(cls: type[WithData] = WithData) -> WithData:
    module = cls(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    module.steps = 4
    return module


def folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def runner(path: str, *callbacks: pl.Callback, layout: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
    return trainer(
        MegatronStrategy(**(layout or {})),
        callbacks=list(callbacks),
        **{
            "enable_checkpointing": True,
            "use_distributed_sampler": False,
            "max_steps": 4,
            "val_check_interval": 1,
            "default_root_dir": path,
            **options,
        },
    )


def _best(path: str, layout: dict[str, Any]) -> dict[str, Any]:
    save = ModelCheckpoint(
        path, "{step}", monitor="val_loss", save_top_k=1, save_last=True, save_on_train_epoch_end=False
    )
    stop = EarlyStopping("val_loss", patience=2, min_delta=10.0, check_on_train_epoch_end=False)
    fitted = runner(path, save, stop, layout=layout, min_epochs=0)
    module = model()
    fitted.fit(module)
    tested = fitted.validate(module, ckpt_path="best", verbose=False)[0]["val_loss"]
    return {
        "step": fitted.global_step,
        "scores": sorted(float(score) for score in save.best_k_models.values()),
        "kept": sorted(Path(name).name for name in save.best_k_models),
        "best": (Path(save.best_model_path).name, float(save.best_model_score or 0), tested),
    }


@pytest.mark.parametrize("layout", [pytest.param({}, marks=pytest.mark.full), {"tensor_parallel": 2}], ids=str)
def test_monitored_checkpoints_and_early_stopping(tmp_path: Path, layout: dict[str, Any]) -> None:
    first, second = run(_best, 2, str(tmp_path), layout)
    assert first == second
    assert first["step"] == 3  # the first validation sets the mark, no later one is that much better
    assert folders(tmp_path) == sorted([*first["kept"], "last.ckpt"])
    name, score, tested = first["best"]
    assert score == first["scores"][0]
    assert tested == pytest.approx(score, rel=1e-12)
    assert (tmp_path / name).is_dir()


def _kept(path: str, options: dict[str, Any]) -> None:
    save = ModelCheckpoint(path, "{step}", every_n_train_steps=1, **options)
    runner(path, save, limit_val_batches=0).fit(model())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"save_top_k": 2, "monitor": "step", "mode": "max"}, ["step=3.ckpt", "step=4.ckpt"]),
        ({"save_top_k": 1}, ["step=4.ckpt"]),
        ({"save_top_k": 1, "save_last": "link"}, ["last.ckpt", "step=4.ckpt"]),
    ],
    ids=str,
)
def test_only_the_last_checkpoints_are_kept(tmp_path: Path, options: dict[str, Any], kept: list[str]) -> None:
    run(_kept, 2, str(tmp_path), options)
    assert folders(tmp_path) == kept


def _resumed(path: str) -> tuple[int, int, list[float]]:
    def save() -> ModelCheckpoint:
        return ModelCheckpoint(path, "{step}", every_n_train_steps=1, save_top_k=1, save_last="link")

    whole, parts = model(), model()
    runner(path + "/whole", limit_val_batches=0, enable_checkpointing=False).fit(whole)
    missing = runner(path, save(), max_steps=2, limit_val_batches=0)
    missing.fit(parts, ckpt_path="last")  # there is none yet: Lightning says so and starts
    resumed = runner(path, save(), limit_val_batches=0)
    again = model()
    resumed.fit(again, ckpt_path="last")
    assert whole.model is not None
    assert again.model is not None
    pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    return missing.global_step, resumed.global_step, [float((a - b).detach().norm()) for a, b in pairs]


def test_last(tmp_path: Path) -> None:
    for missing, resumed, differences in run(_resumed, 2, str(tmp_path)):
        assert (missing, resumed) == (2, 4)
        assert not any(differences)


def _weights_only(path: str) -> tuple[float, float, str]:
    save = ModelCheckpoint(path, "{step}", every_n_train_steps=4, save_weights_only=True)
    first = runner(path, save, limit_val_batches=2)
    module = model()
    first.fit(module)
    again = runner(path, enable_checkpointing=False)
    loaded = again.validate(model(), ckpt_path=f"{path}/step=4.ckpt", verbose=False)[0]["val_loss"]
    try:
        runner(path, enable_checkpointing=False).fit(model(), ckpt_path=f"{path}/step=4.ckpt")
        message = ""
    except (KeyError, ValueError, RuntimeError) as error:
        message = str(error)
    return float(first.callback_metrics["val_loss"]), loaded, message


def test_weights_only(tmp_path: Path) -> None:
    for trained, loaded, message in run(_weights_only, 2, str(tmp_path)):
        assert loaded == pytest.approx(trained, rel=1e-12)
        assert "weights" in message


def _rates(path: str) -> list[float]:
    logger = CSVLogger(path, name="", version="")
    fitted = runner(
        path, LearningRateMonitor("step"), logger=logger, enable_checkpointing=False, accumulate_grad_batches=2,
        log_every_n_steps=1, limit_val_batches=0, max_steps=2,
    )  # fmt: skip
    module = Stepped(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    module.steps = 4
    fitted.fit(module)
    assert fitted.global_step == 2
    return [float(group["lr"]) for group in fitted.optimizers[0].param_groups]


class Stepped(WithData):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_schedules_count_optimizer_steps(tmp_path: Path) -> None:
    assert run(_rates, 2, str(tmp_path)) == [[0.0025]] * 2
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("lr-AdamW")
    assert [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]] == [0.01, 0.01, 0.005, 0.005]


class Plateau(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def _plateau() -> float:
    module = Plateau()
    runner = trainer(strategy(), max_steps=-1, max_epochs=2)
    runner.fit(module, batches(8, 2), batches(8, 2))
    return float(runner.optimizers[0].param_groups[0]["lr"])


def test_plateau_schedules_watch_synced_metrics() -> None:
    assert run(_plateau, 2) == [pytest.approx(0.001)] * 2  # nothing improves that much


@dataclasses.dataclass
class Settings:
    width: int = 3


class Configured(Plain):
    def __init__(self, settings: Settings, activation: Any, rate: float = 0.5) -> None:
        super().__init__("SGD")
        self.save_hyperparameters()


def _hyperparameters(path: str) -> tuple[dict[str, Any], list[list[float]], list[list[float]]]:
    module = Configured(Settings(), torch.tanh)
    fitted = trainer(strategy(), limit_val_batches=0)
    fitted.fit(module, batches(16, 2))
    fitted.save_checkpoint(path)
    fitted.save_checkpoint(path + "2")
    stored = fitted.strategy.load_checkpoint(path)["hyper_parameters"]
    again = Configured(Settings(), torch.tanh)
    trainer(strategy()).validate(again, batches(8, 2), ckpt_path=path, verbose=False)
    return stored, weights(module), weights(again)


def test_hyperparameters_that_are_no_plain_values_are_left_out(tmp_path: Path) -> None:
    for stored, saved, loaded in run(_hyperparameters, 2, str(tmp_path / "a.ckpt")):
        assert stored == {"rate": 0.5}
        assert saved == loaded


def _fast() -> int:
    module = Plain()
    runner = trainer(strategy(), fast_dev_run=2, max_steps=-1)
    runner.fit(module, batches(16, 2), batches(8, 2))
    return runner.global_step


def test_fast_dev_run() -> None:
    assert run(_fast, 2) == [2, 2]


class Tunable(Plain):
    def __init__(self) -> None:
        super().__init__("SGD")
        self.lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def _found(path: str) -> tuple[list[list[float]], list[list[float]], float]:
    module, seen = Tunable(), []

    class Keep(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.append(weights(pl_module))

    before = weights(module.double())
    finder = LearningRateFinder(num_training_steps=8, max_lr=0.5)
    runner = trainer(strategy(), path, callbacks=[finder, Keep()], max_steps=1, limit_val_batches=0)
    runner.fit(module, batches(64, 2))
    return before, seen[-1], module.lr


def test_the_learning_rate_finder_puts_weights_back(tmp_path: Path) -> None:
    for before, after, rate in run(_found, 1, str(tmp_path)):
        assert after == before
        assert rate > 0


class Classifier(pl.LightningModule):
    """What many users write: metrics, a batch norm, and values of all kinds that are logged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.accuracy = MulticlassAccuracy(3)
        self.scores = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)], prefix="val_")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        output = self.net(x)
        loss = nn.functional.cross_entropy(output, y)
        self.accuracy(output, y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        output = self.net(x)
        self.scores.update(output, y)
        self.log("val_loss", nn.functional.cross_entropy(output, y), sync_dist=True)
        self.log_dict(self.scores)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


def _classes(seed: int, shuffle: bool) -> DataLoader[Any]:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4, shuffle=shuffle)


def _classified(kind: str, path: str) -> tuple[Any, dict[str, float]]:
    """Return how the run ended, and all figures that its user sees."""
    save = ModelCheckpoint(monitor="val_loss", filename="{epoch}-{step}", save_last=True)
    stop = EarlyStopping("val_MulticlassAccuracy", mode="max", patience=2)
    loggers = [CSVLogger(path, "csv", ""), TensorBoardLogger(path, "board", "")]
    fitted = trainer(
        {"ddp": "ddp", "megatron": MegatronStrategy(), "fsdp": MegatronFSDPStrategy()}[kind],  # type: ignore[arg-type]
        path, callbacks=[save, stop, LearningRateMonitor()], logger=loggers, enable_checkpointing=True, max_steps=-1,
        max_epochs=8, enable_model_summary=True, log_every_n_steps=1, num_sanity_val_steps=2,
        # with one device, only ddp would replace the loader's own shuffling
        use_distributed_sampler=os.environ["WORLD_SIZE"] != "1",
    )  # fmt: skip
    module = Classifier()
    fitted.fit(module, _classes(1, shuffle=True), _classes(2, shuffle=False))
    end = fitted.current_epoch, fitted.global_step, stop.stopped_epoch, Path(save.best_model_path).name
    trained = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    figures = {f"weight {place}": float(value) for place, value in enumerate(trained)}
    figures |= {
        name: float(value) for name, value in {**fitted.callback_metrics, "score": save.best_model_score}.items()
    }
    best = fitted.validate(module, _classes(2, shuffle=False), ckpt_path="best", verbose=False)[0]
    figures |= {f"best {name}": value for name, value in best.items()}
    if fitted.is_global_zero:
        names, *rows = [line.split(",") for line in Path(path, "csv", "metrics.csv").read_text().splitlines()]
        for number, row in enumerate(rows):
            figures |= {f"row {number} {name}": float(cell) for name, cell in zip(names, row, strict=True) if cell}
        board = EventAccumulator(str(Path(path, "board"))).Reload()
        for tag in board.Tags()["scalars"]:
            figures |= {f"board {tag} {event.step}": event.value for event in board.Scalars(tag)}
    return end, figures


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_classifier_with_all_that_users_add_runs_as_under_ddp(tmp_path: Path, ranks: int) -> None:
    expected = run(_classified, ranks, "ddp", str(tmp_path / "ddp"))
    for kind in ("megatron", "fsdp"):
        for mine, theirs in zip(run(_classified, ranks, kind, str(tmp_path / kind)), expected, strict=True):
            assert mine[0] == theirs[0]
            assert mine[1] == pytest.approx(theirs[1], rel=1e-6)
