"""A checkpoint of any layout, loaded into a whole module for use after training."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from megalight import checkpoint
from megalight.errors import CheckpointError
from megalight.inference.text import load_model
from megalight.models.gpt.module import GPTModule
from megalight.models.module import MegalightModule
from megalight.strategies import MegatronStrategy, load_weights
from megalight.types import Loss
from tests.strategies.training import ADAM, BASE, CONFIGS, SEED, WithData, gathered, global_batch, whole
from tests.support.environment import trainer
from tests.support.workers import run


def _trained(path: str, config: str, precision: str) -> dict[str, Any]:
    module = WithData(CONFIGS[config], optimizer=ADAM, seed=SEED)
    strategy = MegatronStrategy(tensor_parallel=2, sequence_parallel=True)
    options = {"precision": precision, "max_steps": 2, "limit_val_batches": 0, "use_distributed_sampler": False}
    runner = trainer(strategy, **options)
    runner.fit(module)
    runner.save_checkpoint(path)
    if strategy.is_global_zero:  # one rank may load for itself, the other does not
        load_weights(own := GPTModule(CONFIGS[config]), path)
        assert own.model.config == module.config
        assert load_model(path).config == module.config
    return gathered(strategy, module) if precision != "bf16-true" else {}


@pytest.mark.parametrize("config", ["gqa", "tied"])  # 101 tokens: two ranks hold a padded vocabulary
def test_a_split_run_becomes_one_whole_model(tmp_path: Path, config: str) -> None:
    path = tmp_path / "a.ckpt"
    trained = run(_trained, 2, str(path), config, "64-true")[0]
    module = GPTModule(CONFIGS[config])
    load_weights(module, path)
    found = whole(module.model)
    assert set(found) == set(trained)
    for name, value in trained.items():
        assert found[name].dtype == value.dtype
        assert np.array_equal(found[name], value), name
    assert (module.model.head.output_layer.weight is module.model.embed.word.weight) == (config == "tied")


def _logits(path: str) -> Any:
    """Of the next token after every token of a batch, from the split model."""
    module = WithData(BASE, optimizer=ADAM, seed=SEED)
    losses = []

    class Keep(pl.Callback):
        def on_predict_batch_end(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
        ) -> None:
            losses.append(outputs.numpy())

    batches = torch.utils.data.DataLoader([global_batch(0)], batch_size=None)
    runner = trainer(MegatronStrategy(tensor_parallel=2), callbacks=[Keep()], use_distributed_sampler=False)
    runner.predict(module, batches, ckpt_path=path, return_predictions=False)
    return losses[0]


def test_the_whole_model_computes_what_the_split_one_does(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run(_trained, 2, str(path), "gqa", "64-true")
    split = run(_logits, 2, str(path))[0]
    module = GPTModule(BASE)
    load_weights(module, path)
    with torch.no_grad():
        np.testing.assert_allclose(module.predict_step(global_batch(0), 0).numpy(), split, rtol=1e-9)


def test_types_are_those_that_were_saved(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run(_trained, 2, str(path), "gqa", "bf16-true")
    module = GPTModule(BASE)
    load_weights(module, path)
    assert {parameter.dtype for parameter in module.model.parameters()} == {torch.bfloat16}


def new_trainer(strategy: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )


def fit_here(module: pl.LightningModule, strategy: Any, **options: Any) -> pl.Trainer:
    """One step, if ``options`` do not say otherwise."""
    runner = new_trainer(strategy, **{"max_steps": 1, **options})
    runner.fit(module)
    return runner


def test_loaded_weights_train_on_under_any_strategy(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    first = WithData(BASE, optimizer=ADAM)
    fit_here(first, MegatronStrategy(), limit_val_batches=0).save_checkpoint(path)
    losses = []
    for strategy in (MegatronStrategy(), "auto"):
        module = WithData(BASE, optimizer=ADAM)
        load_weights(module, path)
        module.train_dataloader = lambda: torch.utils.data.DataLoader([global_batch(0)], batch_size=None)
        losses.append(float(fit_here(module, strategy, limit_val_batches=0).callback_metrics["train_loss"]))
    batch = global_batch(0)
    with torch.no_grad():
        expected = float((first.predict_step(batch, 0) * batch.loss_mask).sum() / batch.loss_mask.sum())
    assert losses == pytest.approx([expected, expected], rel=1e-5)


def test_the_module_that_was_trained_can_be_loaded_into_again(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    module = WithData(BASE, optimizer=ADAM)
    fit_here(module, MegatronStrategy(), limit_val_batches=0).save_checkpoint(path)
    before = whole(module.model)
    load_weights(module, path)
    for name, value in whole(module.model).items():
        assert np.array_equal(value, before[name]), name


class Plain(pl.LightningModule):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(size, 3)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        return self.layer(batch).square().mean()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(2, 4))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def test_plain_modules_too(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    module = Plain()
    fit_here(module, MegatronStrategy()).save_checkpoint(path)
    other = Plain()
    layer = other.layer
    load_weights(other, path)
    assert other.layer is layer
    assert other.seen == 1
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    fit_here(Plain(), MegatronStrategy()).save_checkpoint(path)
    other = Plain(5)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"layer\.weight.*\[3, 4\].*\[3, 5\]"):
        load_weights(other, path)
    for name, value in before.items():
        assert torch.equal(value, other.state_dict()[name])
    with pytest.raises(CheckpointError, match="not written by GPTModule"):
        load_weights(GPTModule(BASE), path)
    file = tmp_path / "single.ckpt"
    file.write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match=r"single\.ckpt is no checkpoint"):
        load_weights(other, file)
    with pytest.raises(CheckpointError, match=r"newest finished checkpoint beside it is .*a\.ckpt"):
        load_weights(other, tmp_path / "absent.ckpt")
    assert checkpoint.is_complete(path)


def test_a_newer_checkpoint_than_the_last_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that is killed between two saves leaves ``last.ckpt`` behind."""
    runner = fit_here(Plain(), MegatronStrategy())
    with caplog.at_level(logging.WARNING, logger="megalight"):
        for name, told in (("last.ckpt", 0), ("step=4.ckpt", 1), ("last.ckpt", 0)):
            caplog.clear()
            runner.save_checkpoint(tmp_path / name)
            runner.strategy.load_checkpoint(tmp_path / "last.ckpt")
            assert len(caplog.messages) == told
            assert all("last.ckpt is older than" in each and "step=4.ckpt" in each for each in caplog.messages)


@pytest.mark.filterwarnings("ignore:.*exists and is not empty", "ignore:.*ended before the epoch ended")
def test_the_word_last_means_a_newer_checkpoint_beside_it(tmp_path: Path) -> None:
    """As for the commands. A path that is given itself stays."""
    # What a kill between two saves leaves.
    fit_here(Plain(), MegatronStrategy(), max_steps=3).save_checkpoint(tmp_path / "last.ckpt")
    fit_here(Plain(), MegatronStrategy(), max_steps=4).save_checkpoint(tmp_path / "step=4.ckpt")
    for wanted, name in (("last", "step=4.ckpt"), (tmp_path / "last.ckpt", "last.ckpt")):
        again = ModelCheckpoint(tmp_path, filename="{step}", save_last=True)
        runner = new_trainer(MegatronStrategy(), max_steps=4, callbacks=[again], enable_checkpointing=True)
        runner.fit(Plain(), ckpt_path=wanted)
        assert Path(str(runner.ckpt_path)).name == name
        assert "_find_last_checkpoints" not in vars(again)


@pytest.mark.filterwarnings("ignore:.*exists and is not empty", "ignore:.*ended before the epoch ended")
def test_a_callbacks_own_way_to_find_the_last_is_kept(tmp_path: Path) -> None:
    fit_here(Plain(), MegatronStrategy(), max_steps=1).save_checkpoint(tmp_path / "elsewhere" / "last.ckpt")
    saver = ModelCheckpoint(tmp_path)
    saver._find_last_checkpoints = own = lambda trainer: {tmp_path / "elsewhere" / "last.ckpt"}
    runner = new_trainer(MegatronStrategy(), max_steps=2, callbacks=[saver], enable_checkpointing=True)
    runner.fit(Plain(), ckpt_path="last")
    assert (runner.global_step, runner.ckpt_path) == (2, tmp_path / "elsewhere" / "last.ckpt")
    assert vars(saver)["_find_last_checkpoints"] is own


class Scaled(nn.Module):
    """Multiplies by a buffer that no checkpoint holds, as rotary embeddings of other libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.empty(()), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.fill_(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


class Foreign(MegalightModule):
    def build_model(self) -> nn.Module:
        return Scaled()

    def forward_step(self, model: nn.Module, batch: Any, carry: Any = None) -> Any:
        return {"y": model(batch)}

    def loss_step(self, carry: Any, batch: Any) -> Loss:
        return Loss(sum=carry["y"].square().sum())

    def loss_tokens(self, batch: Any) -> torch.Tensor:
        return torch.tensor(float(len(batch)))

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([torch.ones(2, 4)] * 4, batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*ended before the epoch ended", "ignore:.*have no `val_dataloader`")
def test_buffers_that_no_checkpoint_holds_are_there_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    fit_here(first := Foreign(), MegatronStrategy(), limit_val_batches=0).save_checkpoint(path)
    module = Foreign()
    runner = new_trainer(MegatronStrategy(), max_steps=2, limit_val_batches=0)
    runner.fit(module, ckpt_path=str(path))
    assert module.model.scale == 2
    batch = torch.ones(2, 4)  # what every step sees
    with torch.no_grad():
        assert float(runner.callback_metrics["train_loss"]) == pytest.approx(
            float(first.model(batch).square().sum() / 2)
        )
    load_weights(other := Foreign(), path)
    assert other.model.scale == 2
