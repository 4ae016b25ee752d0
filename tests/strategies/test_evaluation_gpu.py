"""Evaluation of one module several times on a GPU, after whose ends Lightning moves metrics to the host."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest

from megalight.strategies import MegatronStrategy
from tests.strategies.training import BASE, SEED, WithData

pytestmark = pytest.mark.gpu


def test_a_module_is_validated_again() -> None:
    module = WithData(BASE, seed=SEED)
    runner = pl.Trainer(
        accelerator="cuda",
        devices=1,
        strategy=MegatronStrategy(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    runner.fit(module)
    first, second = (runner.validate(module, verbose=False)[0]["val_loss"] for _ in range(2))
    assert first == second
