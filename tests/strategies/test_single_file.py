"""Runs go on from a single file of Lightning's own strategies, in other layouts, as if they had never stopped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision
from torch.utils.data import DataLoader, TensorDataset

from megalight.errors import CheckpointError
from megalight.strategies import DataParallelOptions, MegatronStrategy, load_weights
from tests.strategies.regression import Plain, Turns, batches, samples, weights
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED, From, Shares, WithData, gathered, whole
from tests.support.environment import trainer
from tests.support.workers import run

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")

SAVED, END = 2, 4


class WholeBatches(WithData):
    """Brings the same global batches under any strategy."""

    def train_dataloader(self) -> DataLoader[Any]:
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        rows = Shares(END, kwargs["num_replicas"], kwargs["rank"])
        return DataLoader(rows, batch_size=None, sampler=From(self.trainer.global_step, END))


class Double(DoublePrecision):
    """Leaves batches as they are: Lightning cannot convert frozen dataclasses."""

    def convert_input(self, data: Any) -> Any:
        return data


class Whole(Plain):
    """Its optimizer looks at all parameters at once."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def under_lightning(module: pl.LightningModule, steps: int, path: str, data: Any = None, **options: Any) -> pl.Trainer:
    """Train on one device with Lightning's own strategy from the beginning, and save a single file."""
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    runner = pl.Trainer(
        strategy="auto",
        accelerator="cpu",
        devices=1,
        plugins=[Double()],
        max_steps=steps,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        **quiet,
        **options,
    )
    runner.fit(module, data)
    runner.save_checkpoint(path)
    return runner


def _resumed(name: str, path: str, options: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    strategy = MegatronStrategy(micro_batch_size=1, **options)
    runner = trainer(
        strategy, max_steps=END, gradient_clip_val=CLIP, use_distributed_sampler=False, limit_val_batches=0
    )
    module = WholeBatches(CONFIGS[name], optimizer=ADAM, seed=SEED + 1)  # values of its own would show
    runner.fit(module, ckpt_path=path)
    return runner.global_step, gathered(strategy, module)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "full2": (2, {"data_parallel": DataParallelOptions(level="optim_grads_params")}),
    "tp2": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, dict[str, Any]]]:
    """A file after ``SAVED`` steps, and the weights after ``END``, by the name of the configuration."""
    made: dict[str, tuple[str, dict[str, Any]]] = {}

    def make(name: str) -> tuple[str, dict[str, Any]]:
        if name not in made:
            folder, modules = tmp_path_factory.mktemp(name), []
            for steps in (SAVED, END):
                modules.append(WholeBatches(CONFIGS[name], optimizer=ADAM, seed=SEED))
                under_lightning(modules[-1], steps, str(folder / f"{steps}.ckpt"), gradient_clip_val=CLIP)
            assert modules[-1].model is not None
            made[name] = str(folder / f"{SAVED}.ckpt"), whole(modules[-1].model)
        return made[name]

    return make


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tied", "one"),
        pytest.param("gpt2", "dp2", marks=pytest.mark.full),
        ("gqa", "full2"),
        ("gpt2", "tp2"),
        ("tied", "pp2"),
    ],
)
def test_runs_go_on_in_any_layout(files: Any, name: str, layout: str) -> None:
    path, expected = files(name)
    world, options = LAYOUTS[layout]
    for step, found in run(_resumed, world, name, path, options):
        assert step == END
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            # A key bias cancels in the softmax: all it ever holds is rounding.
            error = np.linalg.norm(found[key] - value) / max(float(np.linalg.norm(value)), 1e-3)
            assert error <= 1e-9, f"{key} differs by {error:.2e}"


class FirstEpoch(Turns):
    """When the run is saved, its first layer and one head have never been stepped."""

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(0)


PLAIN: dict[str, Callable[[int], Plain]] = {
    "AdamW": partial(Plain, "AdamW"),
    "SGD": partial(Plain, "SGD"),
    "Turns": partial(FirstEpoch, "AdamW", same=True),
    "LBFGS": partial(Whole, "LBFGS"),
}


def _plain(optimizer: str, path: str) -> list[list[float]]:
    module = PLAIN[optimizer](5)
    runner = trainer(MegatronStrategy(data_parallel=DataParallelOptions(level="no_shard")), max_steps=END)
    # Lightning itself does not skip batches. This loader is as long as the one of the run that stopped.
    rows = DataLoader(TensorDataset(*samples(16)), batch_size=4, sampler=From(4 * SAVED, 16))
    runner.fit(module, rows, ckpt_path=path)
    return weights(module)


@pytest.mark.parametrize("optimizer", PLAIN)
def test_plain_modules_go_on(tmp_path: Path, optimizer: str) -> None:
    expected = PLAIN[optimizer](0)
    under_lightning(PLAIN[optimizer](0), SAVED, str(tmp_path / "a.ckpt"), batches(16, 4))
    under_lightning(expected, END, str(tmp_path / "b.ckpt"), batches(16, 4))
    (found,) = run(_plain, 1, optimizer, str(tmp_path / "a.ckpt"))
    for mine, theirs in zip(found, weights(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9)


class Reversed(Plain):
    """Lists its parameters from the last to the first."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.parameters()][::-1], lr=0.1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Plain("SGD"), "another optimizer: only one of both has .*betas"),
        (Reversed(), "in the order of the model"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, module: Plain, message: str) -> None:
    path = str(tmp_path / "a.ckpt")
    under_lightning(Plain(), SAVED, path, batches(16, 4))
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    runner = pl.Trainer(strategy=MegatronStrategy(), accelerator="cpu", devices=1, max_steps=END, **quiet)
    with pytest.raises(CheckpointError, match=f"{message}.*load_state_dict"):
        runner.fit(module, batches(16, 4), ckpt_path=path)


def test_weights_are_loaded_from_a_file(tmp_path: Path) -> None:
    path, module, other = tmp_path / "a.ckpt", Plain(), Plain(seed=5)
    under_lightning(module, SAVED, str(path), batches(16, 4))
    load_weights(other, path)
    assert weights(other) == weights(module)


def test_a_file_from_before_training_begins_anew(tmp_path: Path) -> None:
    path, expected = str(tmp_path / "a.ckpt"), Plain()
    under_lightning(Plain(), SAVED, path, batches(16, 4))
    under_lightning(expected, END, str(tmp_path / "b.ckpt"), batches(16, 4))
    entries = torch.load(path)
    entries["optimizer_states"] = []
    torch.save(entries, path)
    (found,) = run(_plain, 1, "AdamW", path)
    assert found != weights(expected)  # without the momentum of earlier steps
