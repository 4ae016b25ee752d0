"""Manual optimization, several optimizers and optimizers of whole parameters, as under Lightning's own strategies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn

from megalight.callbacks import CUDAGraph
from megalight.errors import ConfigurationError
from megalight.models.module import MegalightModule
from megalight.strategies import DataParallelOptions, MegatronStrategy
from megalight.strategies.checkpoints import CheckpointOptions
from tests.strategies.regression import Plain, batches, dealt, fit, samples, strategy, weights
from tests.strategies.test_drop_in import close, lightnings_own
from tests.support.environment import trainer
from tests.support.workers import run


class Adversaries(pl.LightningModule):
    """Two optimizers in turns: a generator, and a critic that steps on every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(5, 2), nn.Linear(2, 1)
        self.double()

    def generator_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.critic(self.generator(batch[0])).square().mean()

    def critic_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.critic(batch[1]) - self.critic(self.generator(batch[0]).detach())).square().mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[attr-defined]
        with first.toggle_model():
            self.manual_backward(self.generator_loss(batch))
            first.step()
            first.zero_grad()
        with second.toggle_model():
            self.manual_backward(self.critic_loss(batch))
            if batch_idx % 2:
                second.step()
                second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9),
        ]


def _adversaries(own: bool, epochs: int = 1) -> list[list[float]]:
    module = Adversaries()
    (lightnings_own if own else fit)(module, batches(16, 4), max_epochs=epochs)
    return weights(module)


def test_several_optimizers_step_by_hand() -> None:
    (expected,) = run(_adversaries, 1, True)
    (found,) = run(_adversaries, 1, False)
    assert found == expected


def _replicas() -> tuple[list[list[float]], int]:
    module = Adversaries()
    runner = fit(module, batches(16, 2), strategy("no_shard"))
    return weights(module), runner.global_step


def test_each_step_averages_over_replicas_what_has_arrived() -> None:
    module = Adversaries()
    first, second = module.configure_optimizers()
    for number, step in enumerate(dealt(16, 2, 2)):
        module.generator.zero_grad()
        torch.stack([module.generator_loss(batch) for batch in step]).mean().backward(
            inputs=list(module.generator.parameters())
        )
        first.step()
        torch.stack([module.critic_loss(batch) for batch in step]).mean().backward()
        if number % 2:
            second.step()
            second.zero_grad()
    for found, steps in run(_replicas, 2):
        close(found, weights(module))
        assert steps == 6, "Lightning counts the steps of all optimizers"


class Clipped(Plain):
    """Clips by hand, and reads a gradient before. The backward is Lightning's or torch's."""

    def __init__(self, by_torch: bool = False) -> None:
        super().__init__("SGD")
        self.automatic_optimization = False
        self.by_torch = by_torch
        self.read: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        loss = super().training_step(batch, batch_idx)
        if self.by_torch:
            loss.backward()
        else:
            self.manual_backward(loss)
        self.read.append(self.net[0].bias.grad.sum().item())
        self.clip_gradients(optimizer, gradient_clip_val=0.1)  # type: ignore[arg-type]
        optimizer.step()  # type: ignore[union-attr]


def _clipped(by_torch: bool) -> tuple[list[list[float]], list[float]]:
    module = Clipped(by_torch).double()
    fit(module, batches(16, 2), strategy("no_shard"))
    # After `fit`, a backward is that of one process again.
    module.zero_grad()
    (module.net[0].bias * float(module.global_rank)).sum().backward()
    return weights(module), [*module.read, float(module.net[0].bias.grad.sum())]


@pytest.mark.parametrize("by_torch", [False, True])
def test_gradients_are_those_of_all_replicas_before_they_are_clipped_by_hand(by_torch: bool) -> None:
    module, read = Plain("SGD").double(), []
    optimizer = module.configure_optimizers()
    for step in dealt(16, 2, 2):
        optimizer.zero_grad()
        torch.stack([module.training_step(batch, 0) for batch in step]).mean().backward()
        read.append(module.net[0].bias.grad.sum().item())
        assert nn.utils.clip_grad_norm_(module.parameters(), 0.1) > 0.1
        optimizer.step()
    width = len(module.net[0].bias)
    for rank, (found, gradients) in enumerate(run(_clipped, 2, by_torch)):
        close(found, weights(module))
        assert gradients == pytest.approx([*read, rank * width])


def _resumed_from_beside(folder: str) -> tuple[list[list[float]], list[list[float]]]:
    whole, first, second = Adversaries(), Adversaries(), Adversaries()
    fit(whole, batches(16, 4), max_epochs=2)
    beside = strategy(checkpoints=CheckpointOptions(async_save="per_save"))
    fit(first, batches(16, 4), beside, callbacks=[ModelCheckpoint(folder, "first")], enable_checkpointing=True)
    runner = trainer(strategy(), max_steps=-1, max_epochs=2, limit_val_batches=0)
    runner.fit(second, batches(16, 4), ckpt_path=f"{folder}/first.ckpt")
    return weights(second), weights(whole)


def test_each_optimizer_resumes_from_a_save_beside_training(tmp_path: Path) -> None:
    found, expected = run(_resumed_from_beside, 1, str(tmp_path))[0]
    assert found == expected


class Removes(pl.Callback):
    """Removes a checkpoint when training starts."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.remove_checkpoint(self.path)
        assert not Path(self.path).exists(), "nobody reads it any more"


def _resumed(path: str) -> tuple[list[list[float]], list[list[float]]]:
    whole, first, second = Adversaries(), Adversaries(), Adversaries()
    fit(whole, batches(16, 4), max_epochs=2)
    fit(first, batches(16, 4)).save_checkpoint(path)
    runner = trainer(strategy(), callbacks=[Removes(path)], max_steps=-1, max_epochs=2, limit_val_batches=0)
    runner.fit(second, batches(16, 4), ckpt_path=path)
    return weights(second), weights(whole)


def test_each_optimizer_resumes(tmp_path: Path) -> None:
    found, expected = run(_resumed, 1, str(tmp_path / "epoch.ckpt"))[0]
    assert found == expected


class Newton(Plain):
    """Calls the closure several times per step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3)


def _newton(own: bool, **options: Any) -> list[list[float]]:
    module = Newton().double()
    (lightnings_own if own else fit)(module, batches(8, 4), **{"max_epochs": 2, **options})
    return weights(module)


def test_lbfgs() -> None:
    assert run(_newton, 1, False) == run(_newton, 1, True)


def _newton_on_replicas() -> list[list[float]]:
    module = Newton().double()
    fit(module, batches(8, 2), strategy("no_shard"))
    return weights(module)


def test_lbfgs_on_replicas_sees_the_mean_loss() -> None:
    module = Newton().double()
    optimizer = module.configure_optimizers()
    for step in dealt(8, 2, 2):

        def closure(step: list[Any] = step) -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([module.training_step(batch, 0) for batch in step]).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    for found in run(_newton_on_replicas, 2):
        close(found, weights(module))


class Again(torch.optim.SGD):
    elementwise = True

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


class OnShardsAgain(Plain):
    def configure_optimizers(self) -> Any:
        return Again(self.parameters(), lr=0.1)


def _again() -> str:
    with pytest.raises(ConfigurationError) as refused:
        fit(OnShardsAgain(), batches(4, 4))
    return str(refused.value)


def test_a_closure_that_runs_again_on_shards_is_refused() -> None:
    assert "Again runs its closure again in a step" in run(_again, 1)[0]


class Factored(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


def _factored(own: bool) -> list[list[float]]:
    module = Factored().double()
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    (lightnings_own if own else fit)(module, batches(16, 4), **options)
    return weights(module)


def test_adafactor_with_accumulation_and_clipping() -> None:
    assert run(_factored, 1, False) == run(_factored, 1, True)


class Task(MegalightModule):
    """A module of ours with an optimizer of whole parameters."""

    def build_model(self) -> nn.Module:
        return nn.Linear(5, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("module", "options", "trainer_options", "message"),
    [
        (Newton, {"micro_batch_size": 2}, {}, "micro_batch_size=2. Leave it out"),
        (Newton, {"tensor_parallel": 2}, {"devices": 2}, "no plan for Newton"),
        (Adversaries, {"tensor_parallel": 2}, {"devices": 2}, "tp=2 divide the model or its tokens"),
        (Adversaries, {}, {"devices": 2}, "Pass data_parallel=DataParallelOptions(level='no_shard')"),
        (Task, {}, {"precision": "bf16-true"}, "torch.bfloat16 weights without float32 masters"),
        (Newton, {}, {"callbacks": [CUDAGraph()]}, "no flat shards, which CUDAGraph works on"),
    ],
)
def test_what_needs_whole_parameters_is_refused_elsewhere(
    module: type[pl.LightningModule], options: dict[str, Any], trainer_options: dict[str, Any], message: str
) -> None:
    devices = trainer_options.get("devices", 1)
    with pytest.raises(AssertionError, match=re.escape(message)):
        run(_refused, devices, module, options, {k: v for k, v in trainer_options.items() if k != "devices"})


def _refused(module: type[pl.LightningModule], options: dict[str, Any], trainer_options: dict[str, Any]) -> None:
    how = MegatronStrategy(**options, data_parallel=DataParallelOptions())
    fit(module(), batches(8, 2), how, **trainer_options)


def test_nothing_else_calls_backward() -> None:
    with pytest.raises(ConfigurationError, match="whose training_step has done it already"):
        MegatronStrategy().backward(samples(1)[0], None)


def _averager(name: str) -> pl.Callback:
    return EMAWeightAveraging(decay=0.5) if name == "EMA" else StochasticWeightAveraging(0.01, 2)


def _averaged(own: bool, name: str) -> list[list[float]]:
    module = Plain()
    options: dict[str, Any] = {"max_epochs": 4, "callbacks": [_averager(name)]}
    (lightnings_own if own else fit)(module, batches(8, 4), **options)
    return weights(module)


@pytest.mark.parametrize("name", ["EMA", "SWA"])
def test_averaging_callbacks_of_lightning(name: str) -> None:
    (expected,) = run(_averaged, 1, True, name)
    (found,) = run(_averaged, 1, False, name)
    assert found == expected


def _averaged_replicas(own: bool) -> list[list[float]]:
    module = Plain()
    options: dict[str, Any] = {"callbacks": [_averager("EMA")]}
    if own:  # each batch holds the shares of both replicas
        joined = [tuple(torch.cat(parts) for parts in zip(*step, strict=True)) for step in dealt(16, 2, 2)]
        lightnings_own(module, torch.utils.data.DataLoader(joined, batch_size=None), **options)  # type: ignore[arg-type]
    else:
        fit(module, batches(16, 2), strategy("no_shard"), **options)
    return weights(module)


def test_replicas_average_the_same_weights() -> None:
    (expected,) = run(_averaged_replicas, 1, True)
    for found in run(_averaged_replicas, 2, False):
        close(found, expected)


def _resumed_average(path: str) -> tuple[list[list[float]], list[list[float]]]:
    whole, second = Plain(), Plain(seed=1)
    fit(whole, batches(8, 4), max_epochs=2, callbacks=[_averager("EMA")])
    fit(Plain(), batches(8, 4), callbacks=[_averager("EMA"), Saving(path)])
    runner = trainer(strategy(), max_steps=-1, max_epochs=2, limit_val_batches=0, callbacks=[_averager("EMA")])
    runner.fit(second, batches(8, 4), ckpt_path=path)
    return weights(second), weights(whole)


class Saving(pl.Callback):
    """Saves at the end of each epoch, before the average takes the place of the weights."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_an_average_is_saved_and_resumed(tmp_path: Path) -> None:
    found, expected = run(_resumed_average, 1, str(tmp_path / "average.ckpt"))[0]
    close(found, expected, 0)


class Scheduled(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


def _resumed_stochastic(path: str) -> tuple[list[list[float]], list[list[float]]]:
    whole, second = Scheduled(), Scheduled(seed=1)
    fit(whole, batches(8, 4), max_epochs=5, callbacks=[_averager("SWA")])
    # The callback has put a schedule of its own in place of the module's when this is saved.
    with pytest.raises(ArithmeticError):
        fit(Scheduled(), batches(8, 4), max_epochs=5, callbacks=[_averager("SWA"), Saving(path), Stops()])
    runner = trainer(strategy(), max_steps=-1, max_epochs=5, limit_val_batches=0, callbacks=[_averager("SWA")])
    runner.fit(second, batches(8, 4), ckpt_path=path)
    return weights(second), weights(whole)


class Stops(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 3:
            raise ArithmeticError


def test_a_stochastic_average_is_saved_and_resumed(tmp_path: Path) -> None:
    found, expected = run(_resumed_stochastic, 1, str(tmp_path / "average.ckpt"))[0]
    close(found, expected, 0)


def _of_a_model() -> None:
    from megalight.models.gpt import GPTConfig
    from megalight.models.gpt.module import GPTModule

    module = GPTModule(GPTConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=16, max_sequence_length=8))
    with pytest.raises(ConfigurationError, match=r"copies GPTModule before its model is built\. Use megalight"):
        fit(module, [], callbacks=[_averager("SWA")])


def test_a_model_that_is_built_later_is_not_copied_before() -> None:
    run(_of_a_model, 1)
