"""Graphs switched on by themselves on a GPU: they leave the results as they are."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from megalight.callbacks import CUDAGraph
from megalight.callbacks.cuda_graph import SETTLING, TIMED
from megalight.strategies import MegatronStrategy
from tests.callbacks.test_automatic_graph import FAST, SLOW, Indexed, Logs, StandIn
from tests.strategies.regression import samples, weights

# `Logs` has a validation_step, and there is nothing to validate on.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:You defined a `validation_step`")]


def _trained(kind: Any, callbacks: list[Any]) -> tuple[list[list[float]], list[float]]:
    module = kind()
    runner = pl.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=MegatronStrategy(),
        precision="64-true",
        callbacks=callbacks,
        max_steps=30,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    runner.fit(module, DataLoader(TensorDataset(*samples(120)), batch_size=4))
    return weights(module), module.shown


@pytest.mark.parametrize(("kind", "recorded"), [(Logs, True), (Indexed, False)])
def test_results_are_those_of_eager_steps(kind: Any, recorded: bool) -> None:
    """Recorded for certain: a stand-in for the clock says that launches limit the eager steps."""
    callback = CUDAGraph("auto")
    callback.probe = StandIn(callback, SLOW, FAST)
    found, shown = _trained(kind, [callback])
    expected, seen = _trained(kind, [])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(shown, seen, rtol=1e-10, atol=1e-10)
    assert (callback.replays > SETTLING + TIMED) == recorded, callback.reasons
    assert bool(callback.reasons) != recorded


def test_a_trial_measures_the_device_and_decides() -> None:
    callback = CUDAGraph("auto")
    found, _ = _trained(Logs, [callback])
    assert callback.trial is not None
    assert callback.trial.verdict is not None, "30 steps are enough to decide"
    torch.testing.assert_close(found, _trained(Logs, [])[0], rtol=1e-10, atol=1e-10)
