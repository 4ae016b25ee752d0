import logging
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch.distributed as dist

from megalight.callbacks import EMA
from megalight.errors import ConfigurationError
from megalight.strategies import DataParallel, MegatronStrategy
from tests.callbacks.tiny import Tiny, tiny_trainer
from tests.environment import trainer
from tests.strategies.training import ADAM, BASE, SEED, WithData, gathered
from tests.workers import run

DECAY = 0.8
Weights = dict[str, np.ndarray[Any, Any]]


class Module(WithData):
    """Its validation only looks at the weights."""

    steps = 100

    def validation_step(self, batch, batch_idx):
        return None


class Watch(pl.Callback):
    """Keeps the weights after every step, those that validation saw, and those after it."""

    def __init__(self) -> None:
        self.steps: list[Weights] = []
        self.validated: Weights = {}
        self.after: Weights = {}

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.steps.append(gathered(trainer.strategy, pl_module))

    def on_validation_batch_start(self, trainer, pl_module, *args):
        self.validated = gathered(trainer.strategy, pl_module)

    def on_validation_end(self, trainer, pl_module):
        self.after = gathered(trainer.strategy, pl_module)


class Seen(NamedTuple):
    steps: list[Weights]
    validated: Weights
    after: Weights


def fit(steps: int, tp: int = 1, level: str = "optim", load=None, save=None, **ema_options: Any) -> Seen:
    module = Module(BASE, optimizer=ADAM, seed=SEED)
    strategy = MegatronStrategy(tensor_parallel=tp, data_parallel=DataParallel(level=level))
    watch = Watch()
    runner = trainer(
        strategy,
        callbacks=[EMA(DECAY, **ema_options), watch],
        max_steps=steps,
        val_check_interval=steps,
        limit_val_batches=1,
        use_distributed_sampler=False,
    )
    runner.fit(module, ckpt_path=load)
    if save is not None:
        runner.save_checkpoint(save)
    return Seen(watch.steps, watch.validated, watch.after)


def by_hand(weights: list[Weights], start: int = 0, every: int = 1) -> Weights:
    """The average after the last step; step ``i`` (from 1) has ``weights[i - 1]``."""
    average: Weights = {}
    for step, values in enumerate(weights, start=1):
        if step < start or (average and (step - start) % every):
            continue
        average = {
            name: value if not average else DECAY * average[name] + (1 - DECAY) * value
            for name, value in values.items()
        }
    return average


def assert_equal(found: Weights, expected: Weights) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-14, err_msg=name)


@pytest.mark.parametrize(
    ("world", "tp", "level", "options"),
    [
        (1, 1, "optim", {"start_step": 2}),
        (2, 1, "optim", {}),
        (2, 1, "no_shard", {"every_n_steps": 2}),
        (2, 2, "optim", {"start_step": 2, "every_n_steps": 2}),
    ],
)
def test_validation_sees_the_average_and_training_goes_on_with_the_weights(world, tp, level, options):
    for watch in run(_fit, world, 5, tp, level, options):
        expected = by_hand(watch.steps, options.get("start_step", 0), options.get("every_n_steps", 1))
        assert_equal(watch.validated, expected)
        assert_equal(watch.after, watch.steps[-1])


def _fit(steps, tp, level, options):
    return fit(steps, tp, level, **options)


def test_the_average_survives_a_resume_under_another_layout(tmp_path):
    path = str(tmp_path / "half.ckpt")
    whole = run(_fit, 1, 4, 1, "optim", {})[0]
    run(_fit, 2, 2, 2, "optim", {"save": path})
    resumed = run(_fit, 2, 4, 1, "optim", {"load": path})[0]
    assert_close(resumed.validated, whole.validated)
    # a checkpoint without an average: it begins where the run resumes
    begun = run(_fit_without, 1, path)[0]
    assert_equal(begun.validated, begun.steps[-1])


def _fit_without(path):
    strategy = MegatronStrategy()
    module = Module(BASE, optimizer=ADAM, seed=SEED)
    runner = trainer(strategy, max_steps=2, limit_val_batches=0, use_distributed_sampler=False)
    runner.fit(module)
    runner.save_checkpoint(path + ".plain")
    return fit(3, load=path + ".plain")


def assert_close(found: Weights, expected: Weights) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-7, atol=1e-10, err_msg=name)


class OneRankFails(pl.Callback):
    """In validation, one rank is told of an error, and the other one waits for it elsewhere."""

    def __init__(self, ema: EMA) -> None:
        self.ema = ema
        self.before: list[np.ndarray[Any, Any]] = []
        self.after: list[np.ndarray[Any, Any]] = []
        self.averaged = False

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.before = [*masters_of(trainer), *parameters_of(pl_module)]

    def on_validation_batch_start(self, trainer, pl_module, *args):
        if dist.get_rank() == 0:
            self.averaged = any(
                (a != b).any() for a, b in zip(self.before[-2:], parameters_of(pl_module)[-2:], strict=True)
            )
            self.ema.on_exception(trainer, pl_module, RuntimeError())
            self.after = [*masters_of(trainer), *parameters_of(pl_module)]
        dist.barrier()
        if dist.get_rank() == 1:
            self.ema.on_exception(trainer, pl_module, RuntimeError())


def parameters_of(module: pl.LightningModule) -> list[np.ndarray[Any, Any]]:
    return [parameter.detach().float().numpy().copy() for parameter in module.parameters()]


def masters_of(trainer: pl.Trainer) -> list[np.ndarray[Any, Any]]:
    return [shard.master.detach().numpy().copy() for shard in trainer.strategy.engine.shards]


class Failed(NamedTuple):
    before: list[np.ndarray[Any, Any]]
    after: list[np.ndarray[Any, Any]]
    averaged: bool
    shards: int
    told: list[str]


def _fails_alone(tp: int) -> Failed:
    ema = EMA(DECAY)
    failing, told = OneRankFails(ema), Told()
    logging.getLogger("megalight.callbacks.ema").addHandler(told)
    options = {"max_steps": 2, "val_check_interval": 2, "limit_val_batches": 1, "use_distributed_sampler": False}
    strategy = MegatronStrategy(tensor_parallel=tp)
    # In bf16 weights are no masters of their own.
    runner = trainer(strategy, callbacks=[ema, failing], precision="bf16-mixed", **options)
    runner.fit(Module(BASE, optimizer=ADAM, seed=SEED))
    return Failed(failing.before, failing.after, failing.averaged, len(strategy.engine.shards), told.messages)


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_that_fails_in_validation_waits_for_nobody(tp):
    """Masters are swapped back. Parameters are, too, where this rank has all that they are made from."""
    failed = run(_fails_alone, 2, tp)[0]
    assert failed.averaged
    assert len(failed.before) > failed.shards > 0
    back = len(failed.before) if tp == 2 else failed.shards
    for before, after in zip(failed.before[:back], failed.after[:back], strict=True):
        np.testing.assert_array_equal(before, after)
    assert any("still hold the average" in message for message in failed.told) == (tp == 1)


def test_other_strategies_are_told_what_to_use():
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy does not keep"):
        tiny_trainer(callbacks=[EMA()]).fit(Tiny())


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": -0.1}, {"start_step": -1}, {"every_n_steps": 0}])
def test_impossible_settings_are_refused(options):
    with pytest.raises(ConfigurationError, match="must be at least"):
        EMA(**options)
