"""Asynchronous saves under Lightning: what other saves promise, while steps go on."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from megalight import checkpoint
from megalight.callbacks import EMA, Preemption, Retention, StepProgress
from megalight.callbacks import stopping as preemption
from megalight.checkpoint.async_save.saves import PendingSave, SharedMemory
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.gpt import GPTConfig
from megalight.nn.moe import MoEConfig
from megalight.strategies import MegatronFSDPStrategy, MegatronStrategy
from megalight.strategies.checkpoints import CheckpointOptions, hooks
from megalight.strategies.checkpoints.hooks import AsyncSaves
from tests.checkpoint import simple
from tests.checkpoint.async_workers import fault, workers_of
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED, Losses, WithData
from tests.support.environment import trainer
from tests.support.workers import run

STEPS = 4
GQA = CONFIGS["gqa"]
EXPERTS = replace(GQA, moe=MoEConfig(num_experts=4, ffn_hidden_size=12, pattern=(False, True)))
LAYOUTS: dict[str, tuple[type[MegatronStrategy], dict[str, Any], GPTConfig]] = {
    "tp2": (MegatronStrategy, {"tensor_parallel": 2}, GQA),
    "fsdp": (MegatronFSDPStrategy, {}, GQA),
    "pp2": (MegatronStrategy, {"pipeline_parallel": 2}, GQA),
    "ep2": (MegatronStrategy, {"expert_parallel": 2}, EXPERTS),
    "alone": (MegatronStrategy, {}, GQA),
}
"""Strategy, its options, and the model; for two ranks, but the last."""


class At(pl.Callback):
    """Does something at the end of a step, on every rank."""

    def __init__(self, step: int, act: Callable[[pl.Trainer], None]) -> None:
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.act(trainer)


class AtEnd(pl.Callback):
    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def on_train_end(self, *_: Any) -> None:
        self.act()


class AlwaysSomething(pl.Callback):
    """Once there is a complete checkpoint, there always is one."""

    def __init__(self, folder: str) -> None:
        self.folder, self.seen, self.lost = folder, False, 0

    def on_train_batch_end(self, *_: Any) -> None:
        there = checkpoint.latest(self.folder) is not None
        self.lost += self.seen and not there
        self.seen = self.seen or there


def fit(
    folder: str,
    *callbacks: pl.Callback,
    kind: str | None = "persistent",
    layout: str = "tp2",
    resume: str | None = None,
    steps: int = STEPS,
    when_busy: Any = "wait",
    **save: Any,
) -> list[float]:
    strategy, options, config = LAYOUTS[layout]
    asynchronous = CheckpointOptions(async_save=kind, when_busy=when_busy)  # type: ignore[arg-type]
    losses, module = Losses(), WithData(config, optimizer=ADAM, seed=SEED)
    module.steps = STEPS
    every = {"every_n_train_steps": 1, "save_top_k": -1, "save_last": "link", **save}
    runner = trainer(
        strategy(micro_batch_size=1, checkpoints=asynchronous, **options),  # type: ignore[arg-type]
        callbacks=[EMA(0.5), losses, *callbacks, ModelCheckpoint(folder, "{step}", **every)],
        enable_checkpointing=True,
        max_steps=steps,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    try:
        runner.fit(module, ckpt_path=resume)
    finally:
        assert not workers_of(os.getpid())
    return losses.losses


def files(folder: Path) -> dict[str, bytes]:
    """All files of all checkpoints but the manifests, which hold the time."""
    found = {str(file.relative_to(folder)): file for file in folder.glob("step=*/**/*") if file.is_file()}
    return {name: file.read_bytes() for name, file in found.items() if not name.endswith("manifest.json")}


SAVES = 3
"""One before the save that a run resumes from, and one after it."""


def _pairs(folder: str, kind: str, layout: str) -> tuple[list[float], list[float], list[float]]:
    synchronous = fit(folder, kind=None, layout=layout, steps=SAVES)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.move(folder, f"{folder}-synchronous")
    dist.barrier()
    saves = fit(folder, kind=kind, layout=layout, steps=SAVES)
    again = fit(f"{folder}-again", kind=kind, layout=layout, resume=f"{folder}/step=2.ckpt", steps=SAVES)
    return synchronous, saves, again


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("persistent", "tp2", marks=pytest.mark.full),
        ("per_save", "fsdp"),
        pytest.param("persistent", "pp2", marks=pytest.mark.full),
        pytest.param("persistent", "ep2", marks=pytest.mark.full),
        pytest.param("per_save", "tp2", marks=pytest.mark.full),
        pytest.param("persistent", "fsdp", marks=pytest.mark.full),
        pytest.param("per_save", "pp2", marks=pytest.mark.full),
        pytest.param("per_save", "ep2", marks=pytest.mark.full),
    ],
)
def test_checkpoints_and_losses_are_those_of_other_saves(tmp_path: Path, kind: str, layout: str) -> None:
    folder = tmp_path / "saves"
    for synchronous, saves, again in run(_pairs, 2, str(folder), kind, layout):
        assert saves == synchronous
        assert again == synchronous[2:]
    whole = files(folder)
    assert whole == files(tmp_path / "saves-synchronous")
    assert {name.partition("/")[0] for name in whole} == {f"step={step}.ckpt" for step in range(1, SAVES + 1)}
    assert (folder / "last.ckpt").readlink() == Path(f"step={SAVES}.ckpt")
    resumed = files(tmp_path / "saves-again")
    tensors = {name for name in resumed if name.endswith(".safetensors")}
    assert tensors
    assert all(np.array_equal(resumed[name], whole[name]) for name in tensors)


def _kept(folder: str) -> tuple[int, int]:
    watch, other = AlwaysSomething(f"{folder}/best"), AlwaysSomething(f"{folder}/retained")
    fit(f"{folder}/best", watch, save_top_k=1)
    fit(f"{folder}/retained", other, Retention(last=1, milestones=[1]))
    return watch.lost, other.lost


def test_what_is_replaced_stays_until_the_next_is_there(tmp_path: Path) -> None:
    assert run(_kept, 2, str(tmp_path)) == [(0, 0), (0, 0)]
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["last.ckpt", "step=4.ckpt"]
    retained = sorted(path.name for path in (tmp_path / "retained").iterdir())
    assert retained == ["last.ckpt", "step=1.ckpt", "step=4.ckpt"]


def test_what_is_replaced_stays_while_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    removed: list[str] = []
    saves = AsyncSaves("per_save", False, None, True, removed.append, lambda path: None)
    (one, two), gate = [str(tmp_path / f"{name}.ckpt") for name in "12"], tmp_path / "gate"
    settle = saves.saver.settle

    def settle_one() -> PendingSave:
        assert str(saves.saver.pending.path) == one  # type: ignore[union-attr]
        gate.touch()
        return settle()

    with fault(f"gate:{gate}"):
        saves.begin(one, simple.views(simple.tensors(1)))
    saves.saver.settle = settle_one  # type: ignore[method-assign]
    with fault("gate:/dev/null/never"):
        saves.begin(two, simple.views(simple.tensors(2)))
    saves.remove(one)
    saves.saver.close()
    assert removed == []
    assert checkpoint.is_complete(one)


def test_the_log_says_that_a_save_began_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(hooks, "rank_zero_info", lambda text, *values: told.append(text % values))
    saves = AsyncSaves("persistent", False, None, True, lambda path: None, lambda path: None)
    one, two, three = (str(tmp_path / f"{name}.ckpt") for name in "123")
    saves.begin(one, simple.views(simple.tensors(1)))
    saves.begin(two, simple.views(simple.tensors(2)))
    saves.finish()
    saves.begin(three, simple.views(simple.tensors(3)))
    saves.finish()
    saves.saver.close()
    assert re.fullmatch(rf"saved {one} in \S+ s; training waited \S+ s for it", told[0])
    late = rf"saved {two} in \S+ s; training waited \S+ s for it; it began \S+ s late, after {one}"
    assert re.fullmatch(late, told[1])
    assert re.fullmatch(rf"saved {three} in \S+ s; training waited \S+ s for it", told[2])


def _shown(folder: str) -> str:
    """One save, which takes from the end of the first step to that of the third."""
    gate, path = Path(f"{folder}/gate"), f"{folder}/one.ckpt"

    def opens(trainer: pl.Trainer) -> None:
        gate.touch()
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        while strategy.save_under_way is not None:
            time.sleep(0.01)
            strategy.check_saves()

    steps = [At(1, lambda trainer: trainer.save_checkpoint(path)), At(3, opens)]
    module = WithData(GQA, optimizer=ADAM, seed=SEED)
    module.steps = 5
    runner = trainer(
        MegatronStrategy(micro_batch_size=1, checkpoints=CheckpointOptions(async_save="persistent")),
        callbacks=[*steps, StepProgress(plain=True)],
        enable_progress_bar=True,
        log_every_n_steps=1,
        max_steps=5,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    with fault(f"gate:{gate}"), contextlib.redirect_stdout(io.StringIO()) as told:
        runner.fit(module)
    return told.getvalue()


def test_the_bar_names_the_save_under_way(tmp_path: Path) -> None:
    (told,) = run(_shown, 1, str(tmp_path))
    lines = {int(found[1]): line for line in told.splitlines() if (found := re.match(r"step (\d+)/5", line))}
    assert re.search(r"  saving one\.ckpt \d+ s", lines[2]), told
    assert "saving" not in lines[5], told


def test_what_was_to_be_removed_is_not_forgotten_when_a_save_cannot_begin(tmp_path: Path) -> None:
    removed: list[str] = []
    saves = AsyncSaves("persistent", False, None, True, removed.append, lambda path: None)
    one, two = str(tmp_path / "1.ckpt"), str(tmp_path / "2.ckpt")
    saves.begin(one, simple.views(simple.tensors(1)))
    saves.remove(one)  # it is not published yet
    with pytest.raises(CheckpointError, match="common"):
        saves.begin(one, {}, common={"a": object()})
    assert saves.saver.pending is None
    saves.begin(two, simple.views(simple.tensors(2)))
    saves.finish()
    saves.saver.close()
    assert removed == [one]


def _busy(folder: str) -> list[bool]:
    """The first save takes as long as training. Return whether there was a checkpoint when the log told of it."""
    found: list[bool] = []
    gate = Path(f"{folder}/gate")
    with fault(f"gate:{gate}"):
        fit(f"{folder}/one", AtEnd(gate.touch), when_busy="skip", save_top_k=1)
        gate.unlink(missing_ok=True)
        dist.barrier()
        signaled = At(2, lambda _: (gate.touch(), os.kill(os.getpid(), signal.SIGTERM)))  # type: ignore[arg-type, func-returns-value]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(preemption.log, "warning", lambda _, why, path: found.append(checkpoint.is_complete(path)))
            fit(f"{folder}/preempted", Preemption(every_n_steps=1), signaled, when_busy="skip")
    return found


def test_saves_are_left_out_while_one_is_under_way(tmp_path: Path) -> None:
    assert run(_busy, 2, str(tmp_path)) == [[True], []]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["last.ckpt", "step=1.ckpt"]
    assert checkpoint.open(tmp_path / "one" / "last.ckpt").common["global_step"] == 1
    (last,) = (tmp_path / "preempted").glob("last-preempted-step=*")
    assert checkpoint.open(last).common["global_step"] in (2, 3)  # a signal may arrive in the next step


def _told(folder: str) -> list[str]:
    told = []
    with fault(f"error:{errno.ENOSPC}:1" if dist.get_rank() == 1 else ""):
        try:
            fit(folder, resume=f"{folder}/step=1.ckpt")
        except CheckpointError as error:
            told.append(str(error))
    return told


def test_a_failed_save_ends_training_on_all_ranks_and_loses_nothing(tmp_path: Path) -> None:
    folder = str(tmp_path / "saves")
    run(fit_quietly, 2, folder, 1)
    for (message,) in run(_told, 2, folder):
        assert f"saving {folder}/step=2.ckpt failed on rank" in message
        assert "data/1-0.safetensors cannot be written: [Errno 28] No space left on device" in message
    assert sorted(path.name for path in (tmp_path / "saves").iterdir()) == ["last.ckpt", "step=1.ckpt"]
    assert checkpoint.open(f"{folder}/last.ckpt").common["global_step"] == 1


def fit_quietly(folder: str, steps: int) -> None:
    fit(folder, steps=steps)


def _ended(folder: str) -> list[str]:
    """Training fails, and then is restarted, while the first save is under way."""
    told = []
    gate = Path(f"{folder}/gate")

    def fail(runner: pl.Trainer) -> None:
        gate.touch()
        raise ArithmeticError("enough")

    with fault(f"gate:{gate}"):
        try:
            fit(f"{folder}/failed", At(2, fail), every_n_train_steps=1)
        except ArithmeticError as error:
            told.append(str(error))
    with fault("gate:/dev/null/never"):
        fit(f"{folder}/aborted", At(3, lambda runner: runner.strategy.abort_saves()), every_n_train_steps=2, steps=3)
    return told


def test_a_save_outlives_a_failure_but_not_an_abort(tmp_path: Path) -> None:
    assert run(_ended, 2, str(tmp_path)) == [["enough"], ["enough"]]
    assert "step=1.ckpt" in {path.name for path in checkpoint.finished(tmp_path / "failed")}
    assert checkpoint.open(tmp_path / "failed" / "last.ckpt").common["global_step"] >= 1
    assert not checkpoint.finished(tmp_path / "aborted")


class SaveAtFitEnd(pl.Callback):
    """Lightning has torn the strategy down by then."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_fit_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def _saved_after(folder: str) -> bool:
    path = f"{folder}/end.ckpt"
    fit(folder, SaveAtFitEnd(path), layout="alone", every_n_train_steps=10, steps=1)
    return checkpoint.latest(folder) is not None


def test_a_save_after_training_is_whole_and_leaves_no_worker(tmp_path: Path) -> None:
    assert run(_saved_after, 1, str(tmp_path)) == [True]


def _prepared(folder: str) -> tuple[list[int], list[int]]:
    """Bytes of memory that were made ahead, and that saves took."""
    ahead, taken = list[int](), list[int]()
    prepare, reserve = SharedMemory.prepare, SharedMemory.reserve

    def prepared(self: SharedMemory, nbytes: int) -> None:
        ahead.append(nbytes)
        prepare(self, nbytes)

    def reserved(self: SharedMemory, nbytes: int) -> Tensor:
        taken.append(nbytes)
        return reserve(self, nbytes)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SharedMemory, "prepare", prepared)
        patched.setattr(SharedMemory, "reserve", reserved)
        fit(folder, layout="alone", steps=2, every_n_train_steps=2, save_weights_only=True)
    return ahead, taken


def test_memory_is_made_for_what_is_saved(tmp_path: Path) -> None:
    ((ahead, taken),) = run(_prepared, 1, str(tmp_path))
    assert ahead == taken[:1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"async_save": "persistant"}, "Did you mean 'persistent'"),
        ({"async_save": "persistent", "when_busy": "drop"}, "must be one of wait, skip"),
        ({"when_busy": "skip"}, "choose async_save='persistent'"),
    ],
)
def test_options_that_do_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CheckpointOptions(**options)


def test_a_second_save_of_each_step_is_refused_or_warned_of() -> None:
    skipping = CheckpointOptions(async_save="per_save", when_busy="skip")
    with pytest.raises(ConfigurationError, match="Set save_last='link'"):
        skipping.check_callback(True, 1)
    assert "save_last='link'" in CheckpointOptions(async_save="per_save").check_callback(True, 1)
    assert not skipping.check_callback("link", 1)
    assert not skipping.check_callback(True, 0)
    assert not CheckpointOptions().check_callback(True, 1)
