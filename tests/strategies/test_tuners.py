"""Lightning's finders of the learning rate and the batch size find under MegatronStrategy what they find without it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from tests.strategies.regression import Plain, batches, strategy, weights
from tests.support.environment import trainer
from tests.support.workers import run


class Sized(pl.LightningDataModule):
    """Data whose batch size a finder changes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> DataLoader[Any]:
        return batches(64, self.batch_size)

    def val_dataloader(self) -> list[Any]:
        return []


def _tuner(ours: bool, folder: str) -> Tuner:
    options: dict[str, Any] = {"max_steps": 30, "limit_val_batches": 0}
    if ours:
        return Tuner(trainer(strategy(), folder, **options))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Tuner(
        pl.Trainer(accelerator="cpu", devices=1, precision="64-true", default_root_dir=folder, **quiet, **options)
    )


def _rates(ours: bool, folder: str) -> tuple[list[float], float | None, bool]:
    module = Plain("SGD")
    module.lr = 0.1  # type: ignore[assignment]
    before = weights(module)
    found = _tuner(ours, folder).lr_find(module, datamodule=Sized(), min_lr=1e-4, num_training=24, update_attr=False)
    assert found is not None
    return found.results["loss"], found.suggestion(), weights(module) == before


def _sizes(ours: bool, folder: str) -> tuple[int | None, bool]:
    module, data = Plain(), Sized()
    before = weights(module)
    found = _tuner(ours, folder).scale_batch_size(module, datamodule=data, max_trials=3, steps_per_trial=2)
    return found, weights(module) == before and data.batch_size == found


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_the_rate_is_lightnings(tmp_path: Any) -> None:
    (mine,), (theirs,) = (run(_rates, 1, ours, str(tmp_path)) for ours in (True, False))
    assert mine[0] == pytest.approx(theirs[0], rel=1e-9)
    assert mine[1] == theirs[1]
    assert mine[1] is not None
    # The weights are those from before the search.
    assert mine[2]
    assert theirs[2]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_the_batch_size_is_lightnings(tmp_path: Any) -> None:
    (mine,), (theirs,) = (run(_sizes, 1, ours, str(tmp_path)) for ours in (True, False))
    assert mine == theirs == (8, True)
