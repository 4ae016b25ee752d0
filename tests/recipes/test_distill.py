"""The recipe of distillation: a student learns from what the demo's recipe has trained."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalight import checkpoint
from megalight.callbacks import Distillation
from megalight.cli.lightning import parsed
from megalight.data.gpt.module import GPTDataModule
from megalight.data.tokenizer import Tokenizer
from megalight.errors import DataError
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from tests.recipes.test_layouts import RECIPES, _data, megalight
from tests.recipes.test_lora import WORDS

__all__ = ["_data"]  # the corpus, made before each test


def _with(path: Path, **arguments: Any) -> str:
    """Write a recipe with the callback."""
    callback = {"class_path": "megalight.callbacks.Distillation", "init_args": arguments}
    path.write_text(yaml.safe_dump({"trainer": {"callbacks": [callback]}}))
    return str(path)


@pytest.mark.full
def test_the_recipe_of_distillation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo, distill = (str(RECIPES / f"{name}.yaml") for name in ("demo", "distill"))
    megalight(tmp_path, "fit", "-c", demo, *WORDS)
    teacher = tmp_path / "runs" / "demo" / "checkpoints" / "last.ckpt"
    sizes = ["--model.config.hidden_size=16", "--model.config.ffn_hidden_size=24"]
    learn = ["fit", "-c", demo, "-c", distill, *WORDS, *sizes]
    megalight(tmp_path, *learn)
    (file,) = (tmp_path / "runs" / "distill").rglob("metrics.csv")
    with file.open() as lines:
        columns = set(next(csv.reader(lines)))
    assert {"train_loss", "train_divergence", "train_own_loss", "val_loss", "val_divergence"} <= columns
    student = checkpoint.open(tmp_path / "runs" / "distill" / "checkpoints" / "last.ckpt")
    assert student.tensors["model.embed.word.weight"].shape[1] == 16
    assert not any("teacher" in name for name in student.tensors)
    values = [{"student": "layers.0", "teacher": "layers.0"}, {"student": "head.norm", "teacher": "head.norm"}]
    pairs = _with(tmp_path / "pairs.yaml", teacher=str(teacher), pairs=values)
    monkeypatch.chdir(tmp_path)
    callbacks = parsed([*learn, "-c", pairs]).trainer.callbacks  # type: ignore[attr-defined]
    (callback,) = (each for each in callbacks if isinstance(each, Distillation))
    assert [pair.student for pair in callback.distiller.loss.pairs] == ["layers.0", "head.norm"]
    corpus = str(tmp_path / "runs" / "demo" / "data" / "stdlib")
    data = GPTDataModule(data=corpus, sequence_length=64, global_batch_size=8)
    module = GPTModule(GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=288, max_sequence_length=64))
    Distillation(teacher).attach(module)
    module.check_data(data)
    other = Tokenizer.train(["entirely different writing " * 40], 280)
    data.checkpoint_files = other.files  # type: ignore[method-assign]
    with pytest.raises(DataError, match="was trained with another tokenizer than that of the data"):
        module.check_data(data)
    parts = ["--processes", "2", "--validation", "--", "-c", demo, *WORDS]
    store = [str(teacher), "--top-k", "16", "--output", "runs/teacher_logits", *parts]
    assert "16 of" in megalight(tmp_path, "cache-logits", *store, *sizes)
    recorded = _with(tmp_path / "recorded.yaml", teacher_logits="runs/teacher_logits")
    megalight(tmp_path, *learn, "-c", recorded, "--trainer.default_root_dir=runs/recorded")
    (file,) = (tmp_path / "runs" / "recorded").rglob("metrics.csv")
    with file.open() as lines:
        assert {"train_divergence", "val_loss", "val_divergence"} <= set(next(csv.reader(lines)))
