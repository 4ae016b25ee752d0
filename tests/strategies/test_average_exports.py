"""Exports of moving averages: from checkpoints of every format and layout, those of one device computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalight.callbacks import EMA
from megalight.cli.main import main
from megalight.models.gpt.hugging_face import from_transformers
from megalight.nn.canonical import canonical_tensors
from megalight.strategies import CheckpointOptions, DataParallelOptions, MegatronStrategy
from tests.strategies.test_weights import OPTIONS
from tests.strategies.training import ADAM, BASE, SEED, WithData
from tests.support.environment import trainer
from tests.support.workers import run

FORMATS = ("fully_reshardable", "dp_reshardable", "fsdp_dtensor")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "full2": (2, {"data_parallel": DataParallelOptions(level="optim_grads_params")}),
    "tp2": (2, {"tensor_parallel": 2}),
    "tp2pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
}
DECAY = 0.5


class ByHand(pl.Callback):
    """The mean of a one-device model's weights, computed from whole parameters."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module.model, torch.nn.Module)
        for name, tensor in canonical_tensors(pl_module.model).items():
            now = tensor.detach().clone()
            self.mean[name] = now if name not in self.mean else DECAY * self.mean[name] + (1 - DECAY) * now


def _fit(layout: str, form: str, path: str, ema: EMA | ByHand) -> None:
    strategy = MegatronStrategy(micro_batch_size=1, checkpoints=CheckpointOptions(format=form), **LAYOUTS[layout][1])
    runner = trainer(strategy, callbacks=[ema], max_steps=3, precision="64-true", **OPTIONS)
    runner.fit(WithData(BASE, optimizer=ADAM, seed=SEED))
    runner.save_checkpoint(path)


def _expected(folder: str) -> dict[str, Any]:
    by_hand = ByHand()
    _fit("one", FORMATS[0], f"{folder}/reference.ckpt", by_hand)
    return {name: tensor.numpy() for name, tensor in by_hand.mean.items()}


def _save(layout: str, folder: str) -> None:
    for form in FORMATS:
        _fit(layout, form, f"{folder}/{form}.ckpt", EMA(DECAY))


@pytest.mark.parametrize(
    "layout", ["full2", *(pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS if name != "full2")]
)
def test_averages_of_every_format_and_layout_are_those_of_one_device(layout: str, tmp_path: Path) -> None:
    (expected,) = run(_expected, 1, str(tmp_path))
    run(_save, LAYOUTS[layout][0], layout, str(tmp_path))
    for form in FORMATS:
        folder = tmp_path / f"{form}-hf"
        assert main(["convert", str(tmp_path / f"{form}.ckpt"), str(folder), "--ema", "--quiet"]) == 0
        found = from_transformers(load_file(folder / "model.safetensors"), BASE)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, torch.from_numpy(expected[name]), rtol=1e-9, atol=1e-12, msg=name)


def _not_begun(folder: str) -> None:
    _fit("one", FORMATS[0], f"{folder}/early.ckpt", EMA(DECAY, start_step=100))


def test_averages_that_have_not_begun_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are the weights that the run began with."""
    run(_not_begun, 1, str(tmp_path))
    assert main(["convert", str(tmp_path / "early.ckpt"), str(tmp_path / "out"), "--ema", "--quiet"]) == 2
    assert "have not begun: EMA(start_step=...) counts later steps" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
