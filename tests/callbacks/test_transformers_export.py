"""The export callback: folders beside checkpoints, from all ranks of any layout, that ``transformers`` loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight.callbacks import EMA, Adapters, TransformersExport
from megalight.errors import ConfigurationError
from megalight.strategies import MegatronStrategy
from tests.environment import trainer
from tests.strategies.test_weights import GPT2, LLAMA, OPTIONS, SIZES
from tests.strategies.training import ADAM, BASE, Losses, WithData
from tests.workers import run

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


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
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
    ({}, [ModelCheckpoint("memory://run")], "memory://run is remote storage"),
]


@pytest.mark.parametrize(("options", "callbacks", "message"), BAD, ids=["softcap", "adapters", "remote"])
def test_what_cannot_be_exported_is_refused_before_training(
    options: dict[str, Any], callbacks: list[pl.Callback], message: str
) -> None:
    module = WithData(options.get("config", BASE), optimizer=ADAM)
    runner = pl_trainer(MegatronStrategy(), callbacks=[*callbacks, TransformersExport()], max_steps=1, **OPTIONS)
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
