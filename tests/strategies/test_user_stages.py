"""A plain LightningModule with a model of transformers on the stages of a pipeline: equal to one device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megalight.strategies import MegatronStrategy
from tests.parallel.gathering import gather_canonical
from tests.parallel.tiny_transformers import tiny
from tests.support.environment import trainer
from tests.support.workers import run


class Plain(pl.LightningModule):
    """What a user writes: nothing in it is about parallelism."""

    def __init__(self, family: str = "llama") -> None:
        super().__init__()
        self.net = tiny(family)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.net(batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(kind: type[Plain], options: dict[str, Any], given: dict[str, Any] | None = None) -> Any:
    data = torch.randint(3, 96, (16, 8), generator=torch.Generator().manual_seed(0))
    module, strategy = kind(), MegatronStrategy(micro_batch_size=1, **options)
    runner = trainer(strategy, max_steps=2, **(given or {}))
    runner.fit(module, DataLoader(data, batch_size=4 // strategy.grid(runner.world_size).dp))
    strategy.sync_parameters()
    named = {name: p.detach().clone() for name, p in module.named_parameters()}
    return float(runner.callback_metrics["loss"]), gather_canonical(
        named, strategy.specs, strategy.mesh, sum_partial=False
    )


def test_two_stages() -> None:
    loss, weights = run(trained, 1, Plain, {})[0]
    for found, theirs in run(trained, 2, Plain, {"pipeline_parallel": 2}):
        assert found == pytest.approx(loss, rel=1e-9)
        for name, weight in weights.items():
            torch.testing.assert_close(theirs[name], weight, rtol=1e-9, atol=1e-10)
