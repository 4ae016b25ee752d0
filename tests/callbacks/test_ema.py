import contextlib
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch.distributed as dist

from megalight.callbacks import EMA, Adapters
from megalight.errors import ConfigurationError
from megalight.strategies import DataParallelOptions, MegatronStrategy
from tests.callbacks.tiny import Tiny, tiny_trainer
from tests.strategies.training import ADAM, BASE, SEED, WithData, gathered
from tests.support.environment import trainer
from tests.support.workers import run

DECAY = 0.8
Weights = dict[str, np.ndarray[Any, Any]]


class Module(WithData):
    """Its validation only looks at the weights."""

    steps = 100

    def validation_step(self, batch, batch_idx):
        return None


class Staged(WithData):
    """Of a pipeline, whose stages validate together."""

    steps = 100


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


def fit(
    steps: int, tp: int = 1, level: str = "optim", load=None, save=None, *, adapted=(), pp=1, **ema_options: Any
) -> Seen:
    module = (Module if pp == 1 else Staged)(BASE, optimizer=ADAM, seed=SEED)
    strategy = MegatronStrategy(
        tensor_parallel=tp, pipeline_parallel=pp, data_parallel=DataParallelOptions(level=level), micro_batch_size=2
    )
    watch = Watch()
    runner = trainer(
        strategy,
        callbacks=[EMA(DECAY, **ema_options), watch, *([Adapters(rank=2, targets=adapted)] if adapted else [])],
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


def test_ranks_that_train_nothing_have_no_average(tmp_path):
    path = tmp_path / "a.ckpt"
    watches = run(_adapt_first_layers, 2, 3, path)
    for watch in watches:
        assert_equal(watch.validated, by_hand(watch.steps))
        assert_equal(watch.after, watch.steps[-1])
        assert any((watch.steps[0][name] != value).any() for name, value in watch.after.items())
    (alone,) = run(_adapt_first_layers, 1, 5, None, path)  # the average goes on in another layout
    assert_equal(alone.validated, by_hand(watches[0].steps + alone.steps))


def _adapt_first_layers(steps, save, load=None):
    pp = dist.get_world_size() if dist.is_initialized() else 1
    return fit(steps, pp=pp, adapted=["layers.0.*"], load=load, save=save)


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
    """One rank is told of an error while the model has the average, and the other one waits for it elsewhere."""

    def __init__(self, ema: EMA) -> None:
        self.ema = ema
        self.before: list[np.ndarray[Any, Any]] = []
        self.during: list[list[np.ndarray[Any, Any]]] = []
        self.after: list[list[np.ndarray[Any, Any]]] = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.before = values_of(trainer)

    def on_validation_batch_start(self, trainer, pl_module, *args):
        self.wait_for(1, trainer)
        self.ema.on_exception(trainer, pl_module, RuntimeError())
        self.left(trainer)

    def on_fit_end(self, trainer, pl_module):
        with contextlib.suppress(KeyboardInterrupt), self.ema.applied(trainer):
            self.wait_for(1, trainer)
            raise KeyboardInterrupt
        self.left(trainer)

    def wait_for(self, rank: int, trainer: pl.Trainer) -> None:
        self.during.append(values_of(trainer))
        if dist.get_rank() == rank:
            dist.barrier()

    def left(self, trainer: pl.Trainer) -> None:
        self.after.append(values_of(trainer))
        if dist.get_rank() == 0:
            dist.barrier()


def values_of(trainer: pl.Trainer) -> list[np.ndarray[Any, Any]]:
    """Masters, averages and parameters that this rank holds."""
    buckets = trainer.strategy.engine.buckets
    held = [bucket.own_params if bucket.shards_params else bucket.params for bucket in buckets]
    averages = trainer.strategy.extra_shard_states["ema"]
    tensors = [*(shard.master for shard in trainer.strategy.engine.shards), *averages, *held]
    return [tensor.detach().float().numpy().copy() for tensor in tensors]


class Failed(NamedTuple):
    before: list[np.ndarray[Any, Any]]
    during: list[list[np.ndarray[Any, Any]]]
    after: list[list[np.ndarray[Any, Any]]]


def _fails_alone(tp: int, level: str, whole: bool) -> Failed:
    ema = EMA(DECAY)
    failing = OneRankFails(ema)
    options = {"max_steps": 2, "val_check_interval": 2, "limit_val_batches": 1, "use_distributed_sampler": False}
    strategy = MegatronStrategy(tensor_parallel=tp, data_parallel=DataParallelOptions(level=level))
    # In bf16 weights are no masters of their own.
    precision = "64-true" if whole else "bf16-mixed"
    runner = trainer(strategy, callbacks=[ema, failing], precision=precision, **options)
    runner.fit(Module(BASE, optimizer=ADAM, seed=SEED))
    return Failed(failing.before, failing.during, failing.after)


@pytest.mark.parametrize(
    ("tp", "level", "whole"),
    [(2, "optim", False), (1, "optim", False), (1, "optim", True), (1, "optim_grads_params", False)],
)
def test_a_rank_that_fails_with_the_average_has_its_weights_again(tp, level, whole):
    """Masters, average and parameters are those of before, while the other rank does not take part."""
    for failed in run(_fails_alone, 2, tp, level, whole):
        assert len(failed.during) == len(failed.after) == 2
        for during, after in zip(failed.during, failed.after, strict=True):
            # Masters, averages and parameters alike were others.
            third = len(failed.before) // 3
            for kind in range(3):
                part = slice(kind * third, (kind + 1) * third)
                assert any((a != b).any() for a, b in zip(failed.before[part], during[part], strict=True))
            for before, value in zip(failed.before, after, strict=True):
                np.testing.assert_array_equal(before, value)


class Breaks(Module):
    """Its first validation fails, on all ranks."""

    broken = True

    def validation_step(self, batch, batch_idx):
        if self.broken:
            raise RuntimeError("no such metric")


def _fits_again() -> Seen:
    """Fit after an error in validation; what the second run begins with must be the weights of the first."""
    module = Breaks(BASE, optimizer=ADAM, seed=SEED)
    watch = Watch()
    options = {"max_steps": 2, "val_check_interval": 2, "limit_val_batches": 1, "use_distributed_sampler": False}
    with contextlib.suppress(RuntimeError):
        trainer(MegatronStrategy(), callbacks=[EMA(DECAY), watch], **options).fit(module)
    module.broken = False
    options["max_steps"] = 1
    options["val_check_interval"] = 1
    first = Start()
    trainer(MegatronStrategy(), callbacks=[EMA(DECAY), first], **options).fit(module)
    return Seen(watch.steps, watch.validated, first.weights)


class Start(pl.Callback):
    """Keeps the weights that a run begins with."""

    weights: Weights

    def on_train_start(self, trainer, pl_module):
        self.weights = gathered(trainer.strategy, pl_module)


def test_a_fit_after_an_error_in_validation_begins_from_the_weights():
    for seen in run(_fits_again, 2):
        assert any((seen.validated[name] != value).any() for name, value in seen.steps[-1].items())
        assert_equal(seen.after, seen.steps[-1])


def test_other_strategies_are_told_what_to_use():
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy does not keep"):
        tiny_trainer(callbacks=[EMA()]).fit(Tiny())


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": -0.1}, {"start_step": -1}, {"every_n_steps": 0}])
def test_impossible_settings_are_refused(options):
    with pytest.raises(ConfigurationError, match="must be at least"):
        EMA(**options)
