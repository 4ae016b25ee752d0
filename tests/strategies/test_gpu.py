"""A real run on one GPU: no step makes the host wait, and the losses are those of torch alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megalight.models.gpt.module import GPTModule
from megalight.strategies import MegatronStrategy
from megalight.types import TokenBatch
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED, by_hand, global_batch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:You defined a `validation_step`")]

STRICT = range(3, 9)
"""Steps in which any synchronization is an error: after warm-up, before the end."""


class Batches(torch.utils.data.Dataset[TokenBatch]):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> TokenBatch:
        return global_batch(step)


class Watch(pl.Callback):
    """Keeps losses on the device, and forbids synchronization in some steps."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.losses: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(trainer.strategy.report.loss)
        if self.strict:
            torch.cuda.set_sync_debug_mode("error" if batch_idx + 1 in STRICT else "default")


def watched(
    module: pl.LightningModule, data: Any, strict: bool, *, callbacks: Sequence[pl.Callback] = (), **options: Any
) -> list[float]:
    """Train on one GPU, and return the losses."""
    watch = Watch(strict)
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        log_every_n_steps=1000,
        callbacks=[*callbacks, watch],
        **options,
    )
    try:
        trainer.fit(module, data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [float(loss) for loss in watch.losses]


def batches(steps: int, pin_memory: bool = True) -> DataLoader[TokenBatch]:
    return DataLoader(Batches(steps), batch_size=None, pin_memory=pin_memory)


def fit(precision: str, steps: int, strict: bool) -> list[float]:
    module, strategy = GPTModule(CONFIGS["tied"], optimizer=ADAM, seed=SEED), MegatronStrategy(micro_batch_size=1)
    options = {"strategy": strategy, "precision": precision, "max_steps": steps, "gradient_clip_val": CLIP}
    return watched(module, batches(steps), strict, **options)


def test_no_step_waits_for_the_device() -> None:
    losses = fit("bf16-mixed", 12, strict=True)
    assert len(losses) == 12
    assert np.isfinite(losses).all()


def test_losses_are_those_of_one_device_by_hand() -> None:
    reference = by_hand(CONFIGS["tied"], 3, torch.float64, "cuda")["losses"]
    np.testing.assert_allclose(fit("64-true", 3, strict=False), reference, rtol=1e-9)


def test_a_module_is_validated_again_and_again() -> None:
    """Lightning moves metrics to the CPU at the end of each loop."""
    module = GPTModule(CONFIGS["tied"], optimizer=ADAM, seed=SEED)
    trainer = pl.Trainer(
        accelerator="cuda",
        devices=1,
        strategy=MegatronStrategy(micro_batch_size=1),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, *(DataLoader(Batches(2), batch_size=None) for _ in range(2)))
    losses = [
        trainer.validate(module, DataLoader(Batches(2), batch_size=None), verbose=False)[0]["val_loss"]
        for _ in range(2)
    ]
    assert losses[0] == losses[1] > 0
