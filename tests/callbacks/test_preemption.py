import os
import signal
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight.callbacks import Preemption
from megalight.errors import ConfigurationError
from megalight.strategies import MegatronStrategy
from tests.callbacks.tiny import Tiny, tiny_trainer
from tests.strategies.training import ADAM, BASE, SEED, WithData
from tests.support.environment import trainer
from tests.support.workers import run

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*not resumable:UserWarning",
)


class Kill(pl.Callback):
    """Sends this process a signal after a step."""

    def __init__(self, step: int, number: signal.Signals) -> None:
        self.step, self.number = step, number

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_stops_at_the_next_agreement(number, tmp_path):
    before = signal.getsignal(number)
    preemption = Preemption(every_n_steps=4)
    checkpoints = ModelCheckpoint(dirpath=tmp_path, save_top_k=0)
    runner = tiny_trainer(
        callbacks=[preemption, Kill(5, number), checkpoints], enable_checkpointing=True, limit_val_batches=2
    )
    runner.fit(Tiny())
    assert runner.global_step == 8
    assert preemption.preempted
    assert Path(preemption.saved) == tmp_path / "last-preempted-step=8.ckpt"
    assert "val_loss" not in runner.callback_metrics  # no time was spent on validation
    assert runner.limit_val_batches == 2
    assert signal.getsignal(number) == before
    resumed = tiny_trainer(callbacks=[ModelCheckpoint(dirpath=tmp_path, save_top_k=0)], enable_checkpointing=True)
    resumed.fit(Tiny(), ckpt_path="last")
    assert resumed.global_step == 12


class Late(pl.Callback):
    """Lets the time limit come at a step."""

    def on_train_batch_start(self, trainer, *args):
        for callback in trainer.callbacks:
            if trainer.global_step == 5 and isinstance(callback, Preemption):
                assert 240 < callback._end - time.monotonic() <= 300
                callback._end -= 300


def test_a_time_limit_saves_and_stops(tmp_path):
    preemption = Preemption(every_n_steps=4, dirpath=str(tmp_path), after_minutes=5)
    runner = tiny_trainer(callbacks=[preemption, Late()])
    runner.fit(Tiny())
    assert runner.global_step == 8
    assert preemption.preempted
    assert Path(preemption.saved) == tmp_path / "last-preempted-step=8.ckpt"


def test_without_a_signal_nothing_happens(tmp_path):
    preemption = Preemption(every_n_steps=1, dirpath=str(tmp_path))
    runner = tiny_trainer(callbacks=[preemption])
    runner.fit(Tiny())
    assert runner.global_step == 12
    assert not preemption.preempted
    assert not list(tmp_path.iterdir())


def test_signals_come_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)

    class Break(pl.Callback):
        def on_train_batch_start(self, *args):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        tiny_trainer(callbacks=[Preemption(), Break()]).fit(Tiny())
    assert signal.getsignal(signal.SIGTERM) == before


def test_one_ranks_signal_stops_all_at_the_same_step(tmp_path):
    found = run(_preempted, 2, str(tmp_path))
    assert [step for step, _, _ in found] == [4, 4]
    assert found[0][1] == found[1][1]
    assert Path(found[0][1]).is_dir()
    assert run(_resumed, 1, found[0][1]) == [6]


def _module():
    module = WithData(BASE, optimizer=ADAM, seed=SEED)
    module.steps = 100
    return module


def _preempted(folder):
    preemption = Preemption(every_n_steps=2, dirpath=folder)
    kill = [Kill(3, signal.SIGTERM)] if dist.get_rank() == 1 else []
    runner = trainer(
        MegatronStrategy(), callbacks=[preemption, *kill], max_steps=20, limit_val_batches=0,
        use_distributed_sampler=False,
    )  # fmt: skip
    runner.fit(_module())
    return runner.global_step, preemption.saved, preemption.preempted


def _resumed(path):
    runner = trainer(MegatronStrategy(), max_steps=6, limit_val_batches=0, use_distributed_sampler=False)
    runner.fit(_module(), ckpt_path=path)
    return runner.global_step


def test_unknown_signals_and_intervals_are_refused():
    with pytest.raises(ConfigurationError, match="SIGFOO"):
        Preemption(signals=("SIGFOO",))
    with pytest.raises(ConfigurationError, match="at least 1"):
        Preemption(every_n_steps=0)
    with pytest.raises(ConfigurationError, match="above 0"):
        Preemption(after_minutes=0)
