"""Weights that pipeline stages share: each layout draws and trains them as one device does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megalight import nn as mnn
from megalight.models.module import Carry, MegalightModule
from megalight.strategies import MegatronStrategy
from megalight.types import Loss, TokenBatch
from tests.strategies.training import Losses, assert_same_run, gathered, loader
from tests.support.environment import trainer
from tests.support.workers import run

VOCABULARY, WIDTH = 101, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Later layers have the weights of earlier ones, and the head has those of the embedding.

    Args:
        stated: the ends say how they are drawn, each another way; otherwise their classes know.
    """

    def __init__(self, stated: bool) -> None:
        super().__init__()
        self.embed: nn.Module | None = (
            mnn.Embedding(VOCABULARY, WIDTH, 0.5) if stated else nn.Embedding(VOCABULARY, WIDTH)
        )
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(4)})
        for later, earlier in (self.layers["2"], self.layers["0"]), (self.layers["3"], self.layers["1"]):
            later.up, later.down.weight = earlier.up, earlier.down.weight  # type: ignore[union-attr]
        self.head: nn.Module | None = mnn.Linear(WIDTH, VOCABULARY) if stated else nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, hidden: Tensor | None) -> Tensor:
        x = self.embed(tokens) if self.embed is not None else hidden
        for layer in self.layers.values():
            x = layer(x)
        assert x is not None
        return x if self.head is None else self.head(x)


class Tied(MegalightModule):
    def __init__(self, stated: bool) -> None:
        super().__init__(seed=3)
        self.stated = stated

    def build_model(self) -> nn.Module:
        return Model(self.stated)

    def forward_step(self, model: nn.Module, batch: TokenBatch, carry: Carry | None = None) -> Carry:
        return {"output": model(batch.tokens, carry["output"] if carry else None)}

    def loss_step(self, carry: Carry, batch: TokenBatch) -> Loss:
        losses = nn.functional.cross_entropy(carry["output"].flatten(0, 1), batch.labels.flatten(), reduction="none")
        return Loss((losses * batch.loss_mask.flatten()).sum())

    def loss_tokens(self, batch: TokenBatch) -> Tensor:
        return batch.loss_mask.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.trainer.strategy, 3)


def _fit(stated: bool, **layout: Any) -> dict[str, Any]:
    losses, strategy, module = Losses(), MegatronStrategy(micro_batch_size=1, **layout), Tied(stated)
    trainer(strategy, callbacks=[losses], gradient_clip_val=0.5, use_distributed_sampler=False).fit(module)
    return {
        "losses": losses.losses,
        "norms": losses.norms,
        "initial": losses.initial,
        "final": gathered(strategy, module),
    }


def _piped(stated: bool, chunks: int) -> dict[str, Any]:
    return _fit(stated, pipeline_parallel=2, virtual_pipeline=chunks)


@pytest.mark.parametrize(("stated", "chunks"), [(False, 1), (False, 2), (True, 1)])
def test_stages_share_weights_as_one_device_does(stated: bool, chunks: int) -> None:
    (expected,) = run(_fit, 1, stated)
    for found in run(_piped, 2, stated, chunks):
        assert_same_run(found, expected)
