"""The last step of a run is saved once, however the run ends."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

from megalight import checkpoint
from megalight.callbacks import FinalCheckpoint, Preemption
from tests.callbacks.tiny import Tiny, tiny_trainer
from tests.strategies.regression import Plain, batches, strategy, weights
from tests.support.environment import trainer
from tests.support.workers import run

NEWEST = {"save_top_k": 2, "monitor": "step", "mode": "max"}


class Module(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)
        self.log("flat", 1.0, sync_dist=True)


class Signal(pl.Callback):
    """Sends the last rank a signal in a step."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), self.number)


def _fit(
    folder: str,
    options: dict[str, Any],
    arguments: dict[str, Any] | None = None,
    more: list[Any] | None = None,
    resume: str | None = None,
) -> tuple[list[tuple[str, int]], list[str], Any, bool]:
    """Return the steps of checkpoints by name, in order of their saves, what was written, weights, the flag."""
    saver = ModelCheckpoint(folder, **{"every_n_train_steps": 2, **options})
    final = FinalCheckpoint()
    defaults = {"max_steps": 3, "max_epochs": None, "limit_val_batches": 1, "enable_checkpointing": True}
    runner = trainer(strategy(), callbacks=[final, *(more or []), saver], **{**defaults, **(arguments or {})})
    module = Module().double()
    written: list[str] = []
    save = runner.strategy.save_checkpoint

    def noted(entries: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        written.append(Path(path).name)
        save(entries, path, *args, **kwargs)

    runner.strategy.save_checkpoint = noted  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGINT)
    with suppress(SystemExit):
        runner.fit(module, batches(32, 2), batches(4, 2), ckpt_path=resume)
    assert signal.getsignal(signal.SIGINT) == before
    held = {each.name: checkpoint.open(each).common["global_step"] for each in Path(folder).glob("*.ckpt")}
    return sorted(held.items()), written, weights(module), final.interrupted


@pytest.mark.parametrize(
    ("options", "held", "written"),
    [
        ({**NEWEST, "save_last": True}, {"epoch=0-step=2.ckpt": 2, "epoch=0-step=3.ckpt": 3, "last.ckpt": 3}, 4),
        ({**NEWEST, "save_last": "link"}, {"epoch=0-step=2.ckpt": 2, "epoch=0-step=3.ckpt": 3, "last.ckpt": 3}, 2),
        ({"filename": "last"}, {"last.ckpt": 3}, 2),
        ({"filename": "last", "every_n_train_steps": 60}, {"last.ckpt": 3}, 1),
        ({"monitor": "val_loss", "every_n_train_steps": 60}, {"epoch=0-step=3.ckpt": 3}, 1),
        ({"monitor": "val_loss", "every_n_train_steps": 60, "save_last": True}, {"last.ckpt": 3}, 1),
        ({"every_n_train_steps": 3}, {"epoch=0-step=3.ckpt": 3}, 1),
        ({"save_top_k": 0}, {"epoch=0-step=3.ckpt": 3}, 1),
    ],
    ids=str,
)
def test_a_complete_run(tmp_path: Path, options: dict[str, Any], held: dict[str, int], written: int) -> None:
    for found, writes, _, _ in run(_fit, 2, str(tmp_path), options):
        assert found == sorted(held.items())
        assert len(writes) == written


def test_a_cut_epoch_goes_on(tmp_path: Path) -> None:
    """A run goes on from the last step as from a checkpoint that was saved inside training."""
    arguments = {"max_steps": 6, "limit_val_batches": 0}
    found = {}
    for name, every in (("inside", 3), ("end", 60)):
        folder = str(tmp_path / name)
        ((((path, _),), *_),) = run(_fit, 1, folder, {"every_n_train_steps": every})
        saved = checkpoint.open(tmp_path / name / path)
        found[name] = _progress(saved), _resumed(str(tmp_path / name / path), arguments)
    assert found["end"] == found["inside"]


def _progress(saved: Any) -> Any:
    return saved.common["epoch"], saved.common["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"]


def _resumed(path: str, arguments: dict[str, Any]) -> Any:
    ((_, written, values, _),) = run(_fit, 1, str(Path(path).parent / "next"), {}, arguments, None, path)
    return written, values


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal(tmp_path: Path, ranks: int, number: int) -> None:
    options = {**NEWEST, "every_n_train_steps": 60}
    *_, last = everyone = run(_fit, ranks, str(tmp_path), options, {"max_steps": 9}, [Signal(number)])
    for found, writes, _, _ in everyone:
        assert found == [("epoch=0-step=3.ckpt", 3)]
        assert len(writes) == 1
    assert last[3] == (number == signal.SIGINT)


def test_a_callback_that_stops_the_run(tmp_path: Path) -> None:
    stop = EarlyStopping("flat", patience=1, check_on_train_epoch_end=False)
    ((found, writes, _, _),) = run(
        _fit, 1, str(tmp_path), {"every_n_train_steps": 60}, {"max_steps": 9, "val_check_interval": 1}, [stop]
    )
    assert found == [("epoch=0-step=2.ckpt", 2)]
    assert len(writes) == 1


def _preempted(folder: str) -> Any:
    return _fit(folder, {}, {"max_steps": 9}, [Preemption(every_n_steps=1), Signal(signal.SIGTERM)])


def test_nothing_is_saved_twice_or_without_a_step(tmp_path: Path) -> None:
    ((_, writes, _, _),) = run(_preempted, 1, str(tmp_path / "a"))
    assert writes == ["epoch=0-step=2.ckpt", "last-preempted-step=3.ckpt"]
    ((_, writes, _, _),) = run(_fit, 1, str(tmp_path / "b"), {}, {"max_steps": 2})
    assert writes == ["epoch=0-step=2.ckpt"]
    path = str(tmp_path / "b" / "epoch=0-step=2.ckpt")
    ((_, writes, _, _),) = run(_fit, 1, str(tmp_path / "c"), {"save_last": True}, {"max_steps": 2}, None, path)
    assert writes == []


@pytest.mark.parametrize("batches", [1, 2])
def test_a_trial_run_writes_nothing(tmp_path: Path, batches: int) -> None:
    ((found, _, _, _),) = run(_fit, 1, str(tmp_path), {"save_last": True}, {"fast_dev_run": batches})
    assert found == []
    assert not list(tmp_path.iterdir())


class Broken(pl.Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        raise RuntimeError("broken")


def test_nothing_is_saved_after_an_error(tmp_path: Path) -> None:
    final = FinalCheckpoint()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError, match="broken"):
        tiny_trainer(callbacks=[final, Broken(), saver], enable_checkpointing=True).fit(Tiny())
    assert signal.getsignal(signal.SIGINT) == before
    assert not list(tmp_path.iterdir())
