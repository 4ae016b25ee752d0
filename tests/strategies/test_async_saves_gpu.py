"""Saves beside training on a GPU: what is copied during the next step has the values from before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megalight import checkpoint
from megalight.checkpoint import saving
from megalight.checkpoint.view import Box, View
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.strategies import MegatronStrategy
from megalight.strategies.checkpoints import CheckpointOptions
from megalight.types import TokenBatch

pytestmark = pytest.mark.gpu

STEPS = 3
WIDE = GPTConfig(num_layers=1, hidden_size=2048, num_heads=16, vocab_size=512, max_sequence_length=16)
"""Its masters and moments take some 15 ms to copy, which is longer than a step on eight tokens."""


def views_of(strategy: Any) -> dict[str, View]:
    strategy.engine.sync_parameters()
    return checkpoint.SCHEMES["fully_reshardable"](strategy.run.contents(optimizer=True))


class Save(pl.Callback):
    """Saves after each step, and keeps the values of that moment."""

    reads_weights = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: dict[int, dict[str, list[Tensor]]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        views = views_of(trainer.strategy)
        self.kept[trainer.global_step] = {name: [b.data.cpu() for b in view.boxes] for name, view in views.items()}
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def read(path: Path, like: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, whole."""
    opened = checkpoint.open(path)
    found = {n: torch.empty(info.shape, dtype=getattr(torch, info.dtype)) for n, info in opened.tensors.items()}
    views = {name: View(name, tensor.shape, [Box((0,) * tensor.ndim, tensor)]) for name, tensor in found.items()}
    opened.fill(checkpoint.targets_of(views))
    assert found.keys() == like.keys()
    return found


def test_saves_have_the_values_of_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(saving.HostCopies):
        def __init__(self, sources: Any, into: Any) -> None:
            made.append(len(sources))
            super().__init__(sources, into)

    monkeypatch.setattr(saving, "HostCopies", Counted)
    save = Save(tmp_path)
    runner = pl.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        strategy=MegatronStrategy(micro_batch_size=1, checkpoints=CheckpointOptions(async_save="persistent")),
        callbacks=[save],
        max_steps=STEPS,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    class Module(GPTModule):
        def val_dataloader(self) -> Any:
            return []

    ids = torch.arange(9).expand(STEPS, 1, 9)
    rows = [TokenBatch(row[:, :-1].contiguous(), row[:, 1:].contiguous(), torch.ones(1, 8)) for row in ids]
    runner.fit(Module(WIDE), DataLoader(rows, batch_size=None))  # type: ignore[arg-type]
    assert len(made) == STEPS
    for step, kept in save.kept.items():
        found = read(tmp_path / f"{step}.ckpt", kept)
        for name, boxes in kept.items():
            assert torch.equal(torch.cat([b.reshape(-1) for b in boxes]), found[name].reshape(-1)), (step, name)
    first, last = (save.kept[step]["optimizer.master.model.layers.0.mlp.down.weight"][0] for step in (1, STEPS))
    assert not torch.equal(first, last), "the values change from step to step"
