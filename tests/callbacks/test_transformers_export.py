"""The export callback: folders beside checkpoints, from all ranks of any layout, that ``transformers`` loads."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight.callbacks import EMA, Adapters, Preemption, TransformersExport, transformers_export
from megalight.checkpoint.disk.publish import delete, place
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.hugging_face.export import export
from megalight.strategies import MegatronStrategy
from tests.strategies.test_weights import GPT2, LLAMA, OPTIONS, SIZES
from tests.strategies.training import ADAM, BASE, Losses, WithData
from tests.support.environment import trainer
from tests.support.workers import run

transformers = pytest.importorskip("transformers")


def pl_trainer(strategy: MegatronStrategy, **options: Any) -> pl.Trainer:
    """A Trainer of this process alone."""
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        **{"logger": False, "enable_progress_bar": False, "enable_model_summary": False, **options},
    )


def _train(start: Path, root: Path, layout: dict[str, Any]) -> tuple[list[float], list[str]]:
    seen = Losses()
    module = WithData(None, optimizer=ADAM, weights=start)
    callbacks = [
        EMA(0.5),
        seen,
        TransformersExport(when="checkpoint"),
        ModelCheckpoint(root, filename="{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max"),
    ]
    strategy = MegatronStrategy(micro_batch_size=1, **layout)
    trainer(strategy, callbacks=callbacks, max_steps=3, **{**OPTIONS, "enable_checkpointing": True}).fit(module)
    return seen.losses, sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_a_run_from_their_folder_to_theirs(kind: str, tmp_path: Path) -> None:
    """Start from a folder, train under TP2 x PP2, export at every checkpoint, start from the export."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES, **LLAMA, num_key_value_heads=2, max_position_embeddings=24)
    model = transformers.LlamaForCausalLM(config)
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **GPT2))
    model.save_pretrained(tmp_path / "start")
    layout = {"tensor_parallel": 2, "pipeline_parallel": 2}
    (losses, names), *_ = run(_train, 4, tmp_path / "start", tmp_path / "run", layout)
    assert names == ["step=3-hf", "step=3.ckpt"]
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "step=3-hf")
    assert type(trained) is type(model)
    assert not torch.equal(next(trained.parameters()), next(model.parameters()))
    # the exported model goes on where the run ended
    ((again, _),) = run(_train, 1, tmp_path / "run" / "step=3-hf", tmp_path / "again", {})
    ((first, _),) = run(_train, 1, tmp_path / "start", tmp_path / "one", {})
    np.testing.assert_allclose(losses, first, rtol=1e-4)
    assert again[0] < first[0]


def test_the_last_checkpoint_and_its_averages_at_the_end(tmp_path: Path) -> None:
    export = TransformersExport(dtype="bfloat16", ema=True)
    module = WithData(BASE, optimizer=ADAM)
    save = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=2)
    options = {**OPTIONS, "enable_checkpointing": True}
    pl_trainer(MegatronStrategy(), callbacks=[EMA(0.5), export, save], max_steps=2, **options).fit(module)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last-hf", "last.ckpt"]
    averaged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "last-hf")
    assert averaged.dtype == torch.bfloat16
    assert module.model is not None
    found, trained = averaged.model.norm.weight.float(), module.model.head.norm.weight.detach()
    assert not torch.equal(found, trained.bfloat16().float())
    torch.testing.assert_close(found, trained, rtol=0.05, atol=0.05)


BAD = [
    ({"config": replace(BASE, logit_softcap=3.0)}, [], "logit_softcap is 3.0 here"),
    ({}, [Adapters(rank=2)], "cannot write a model with adapters"),
    ({}, [], "this run saves none. Add a ModelCheckpoint, or name a folder"),
]


@pytest.mark.parametrize(("options", "callbacks", "message"), BAD, ids=["softcap", "adapters", "no checkpoints"])
def test_what_cannot_be_exported_is_refused_before_training(
    options: dict[str, Any], callbacks: list[pl.Callback], message: str
) -> None:
    module = WithData(options.get("config", BASE), optimizer=ADAM)
    runner = pl_trainer(
        MegatronStrategy(),
        callbacks=[*callbacks, TransformersExport()],
        max_steps=1,
        **{**OPTIONS, "enable_checkpointing": False},
    )
    with pytest.raises(ConfigurationError, match=message):
        runner.fit(module)


def test_other_strategies_and_arguments_are_refused() -> None:
    runner = pl.Trainer(accelerator="cpu", callbacks=[TransformersExport()], logger=False, max_steps=1)
    with pytest.raises(ConfigurationError, match=r"reads the checkpoints of MegatronStrategy.*SingleDeviceStrategy"):
        runner.fit(WithData(BASE, optimizer=ADAM))
    with pytest.raises(ConfigurationError, match="when is 'always'"):
        TransformersExport(when="always")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="dtype is 'int8'"):
        TransformersExport(dtype="int8")
    with pytest.raises(ConfigurationError, match="folder is 'out' and when is 'checkpoint'"):
        TransformersExport(when="checkpoint", folder="out")


def test_averages_that_no_checkpoint_will_have_are_refused_before_training(tmp_path: Path) -> None:
    options = {**OPTIONS, "enable_checkpointing": True}
    whole = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    weights = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_weights_only=True)
    for callbacks, message in (
        ([whole], "this run keeps none. Add the callback EMA"),
        ([weights, EMA(0.5)], "saves weights alone. Leave save_weights_only out"),
    ):
        runner = pl_trainer(
            MegatronStrategy(), callbacks=[*callbacks, TransformersExport(ema=True)], max_steps=1, **options
        )
        with pytest.raises(ConfigurationError, match=message):
            runner.fit(WithData(BASE, optimizer=ADAM))
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch")
def test_averages_that_begin_after_the_last_step_are_refused_before_training(tmp_path: Path) -> None:
    """Whether steps or epochs end the run. Averages that a checkpoint has begun serve, whatever the callback says."""
    options = {**OPTIONS, "enable_checkpointing": True}

    def fit(folder: str, start_step: int, resume: Path | None = None, **ends: int) -> set[str]:
        save = ModelCheckpoint(tmp_path / folder, filename="a", every_n_train_steps=1)
        callbacks = [EMA(0.5, start_step), TransformersExport(ema=True), save]
        runner = pl_trainer(MegatronStrategy(), callbacks=callbacks, **ends, **options)
        runner.fit(WithData(BASE, optimizer=ADAM), ckpt_path=resume)
        return {path.name for path in (tmp_path / folder).iterdir()}

    for ends, last in (({"max_steps": 2}, 2), ({"max_epochs": 1, "limit_train_batches": 1}, 1)):
        with pytest.raises(ConfigurationError, match=rf"at step 3 \(start_step\), and this run ends at step {last}\."):
            fit("run", 3, **ends)
        assert not list(tmp_path.rglob("*"))
    assert fit("run", 2, max_steps=2) == {"a.ckpt", "a-hf"}
    assert fit("again", 9, tmp_path / "run" / "a.ckpt", max_steps=3) == {"a.ckpt", "a-hf"}


def test_averages_at_the_end_though_the_last_checkpoint_has_none(tmp_path: Path) -> None:
    weights = ModelCheckpoint(tmp_path / "run", filename="a", every_n_train_steps=3, save_weights_only=True)
    _fit(tmp_path / "with", EMA(0.5), weights, steps=3, ema=True)
    _fit(tmp_path / "without", EMA(0.5), steps=3, ema=True)
    _fit(tmp_path / "trained", steps=3)
    found, trained = (_parameters(tmp_path / name) for name in ("with", "trained"))
    assert all(torch.equal(tensor, found[key]) for key, tensor in _parameters(tmp_path / "without").items())
    assert not any(torch.equal(found[key], tensor) for key, tensor in trained.items())
    assert not list(tmp_path.glob("last-for-*"))


def test_checkpoints_before_the_averages_begin_get_no_folder(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [EMA(0.5, start_step=2), TransformersExport(when="checkpoint", ema=True), save]
    runner = pl_trainer(
        MegatronStrategy(), callbacks=callbacks, max_steps=3, **{**OPTIONS, "enable_checkpointing": True}
    )
    runner.fit(WithData(BASE, optimizer=ADAM))
    assert {path.name for path in tmp_path.glob("*-hf")} == {"step=2-hf", "step=3-hf"}


class Stopped(Preemption):
    """A run that was told to stop."""

    def on_train_end(self, *_: Any) -> None:
        self.preempted = True


def _fit(folder: str | Path, *callbacks: pl.Callback, steps: int = 2, **options: Any) -> list[float]:
    """Train on one device with ``--export_hf=folder``."""
    seen = Losses()
    export = TransformersExport(folder=str(folder), **options)
    given = {**OPTIONS, "enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in callbacks)}
    pl_trainer(MegatronStrategy(), callbacks=[seen, export, *callbacks], max_steps=steps, **given).fit(
        WithData(BASE, optimizer=ADAM)
    )
    return seen.losses


def _parameters(folder: Path) -> dict[str, torch.Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def test_a_folder_of_the_last_step_whatever_was_saved(tmp_path: Path) -> None:
    """Without checkpoints, with an older one, and with one of the last step: the same weights, and nothing beside."""
    for name, save in (
        ("none", []),
        (
            "older",
            [ModelCheckpoint(tmp_path / "run", filename="a", every_n_train_steps=2, save_on_train_epoch_end=False)],
        ),
        ("last", [ModelCheckpoint(tmp_path / "again", filename="b", every_n_train_steps=3)]),
    ):
        _fit(tmp_path / name, *save, steps=3)
        assert not list(tmp_path.glob("last-for-*"))
    first = _parameters(tmp_path / "none")
    for name in ("older", "last"):
        assert all(torch.equal(tensor, first[key]) for key, tensor in _parameters(tmp_path / name).items())


def _slowly(folder: Path) -> None:
    """Rank 1 reads its checkpoint for longer."""

    def slow(model: Any, *args: Any, **options: Any) -> None:
        export(model, *args, **options)
        time.sleep(torch.distributed.get_rank() * 0.5)

    callbacks = [TransformersExport(folder=str(folder))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_export, "export", slow)
        trainer(MegatronStrategy(tensor_parallel=2), callbacks=callbacks, max_steps=1, **OPTIONS).fit(
            WithData(BASE, optimizer=ADAM)
        )


def test_the_checkpoint_of_the_last_step_goes_when_no_rank_reads_it(tmp_path: Path) -> None:
    run(_slowly, 2, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear all")
    (tmp_path / "file").write_text("")
    for folder, message in (("mine", "mine is there already"), ("file/out", "file is not a folder where")):
        with pytest.raises(CheckpointError, match=message):
            _fit(tmp_path / folder)
    with pytest.raises(CheckpointError, match="nowhere://out cannot be reached"):
        _fit("nowhere://out")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear all"


def test_a_run_that_goes_on_later_writes_no_folder(tmp_path: Path) -> None:
    _fit(tmp_path / "out", Stopped())
    assert not (tmp_path / "out").exists()


def test_folders_in_a_store(tmp_path: Path) -> None:
    """Beside checkpoints there, replaced and removed with them; and one at the end."""
    run = place(f"memory://{uuid4().hex}")
    save = ModelCheckpoint(str(run), filename="{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
    last = ModelCheckpoint(str(run / "l"), filename="last", every_n_train_steps=1, enable_version_counter=False)
    _fit(str(run / "end"), save, last, TransformersExport(when="checkpoint"))
    assert {each.name for each in run.iterdir()} == {"step=2.ckpt", "step=2-hf", "end", "l"}
    run.store.get((run / "end").key, str(tmp_path / "end"), recursive=True)
    run.store.get((run / "l" / "last-hf").key, str(tmp_path / "beside"), recursive=True)
    found = _parameters(tmp_path / "end")
    assert found
    assert all(torch.equal(tensor, found[key]) for key, tensor in _parameters(tmp_path / "beside").items())
    delete(run)


def _memory_of_one() -> str:
    with pytest.raises(ConfigurationError, match="memory://out is memory of one process, and the 2 ranks") as raised:
        trainer(MegatronStrategy(), callbacks=[TransformersExport(folder="memory://out")], max_steps=1, **OPTIONS).fit(
            WithData(BASE, optimizer=ADAM)
        )
    return str(raised.value)


def test_memory_of_one_process_is_refused_for_several() -> None:
    assert len(set(run(_memory_of_one, 2))) == 1
