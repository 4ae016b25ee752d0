"""A GPT whose tokens have positions on several axes trains under every kind of layout as on one device."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megalight.models.gpt import PositionConfig
from megalight.ops.rotary import RotaryAxes
from megalight.types import TokenBatch
from tests.strategies.training import CONFIGS, Shares, WithData, assert_same_run, by_hand, fit, global_batch
from tests.support.workers import run

# Padding gets positions too: 24 tokens of documents do not divide by 2 * cp * tp.
MODEL = replace(CONFIGS["gqa"], position=PositionConfig(axes=RotaryAxes((2, 1, 1), interleaved=True)))
LAYOUTS: list[Any] = [
    (4, {"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 2}),
    (2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    pytest.param(2, {"context_parallel": 2}, marks=pytest.mark.full),
]


def placed(step: int) -> TokenBatch:
    """A global batch whose tokens have three positions."""
    batch = global_batch(step, packed=True)
    generator = torch.Generator().manual_seed(step)
    return replace(batch, axis_positions=torch.randint(0, 30, (len(batch), 3, 12), generator=generator))


class Placed(Shares):
    def __getitem__(self, step: int) -> TokenBatch:
        batch = placed(step)
        return batch.split(len(batch) // self.replicas)[self.rank]


class WithAxes(WithData):
    def train_dataloader(self) -> DataLoader[Any]:
        share = self.trainer.strategy.distributed_sampler_kwargs
        return DataLoader(Placed(self.steps, share["num_replicas"], share["rank"]), batch_size=None)


@functools.cache
def expected() -> dict[str, Any]:
    return by_hand(MODEL, batches=placed)


def _rank(options: dict[str, Any]) -> dict[str, Any]:
    return fit(MODEL, module_type=WithAxes, **options)


@pytest.mark.parametrize(("ranks", "options"), LAYOUTS, ids=str)
def test_layout_trains_the_same_model(ranks: int, options: dict[str, Any]) -> None:
    assert_same_run(run(_rank, ranks, options)[0], expected())


def test_positions_on_axes_matter() -> None:
    assert abs(by_hand(MODEL, steps=1, packed=True)["losses"][0] - expected()["losses"][0]) > 1e-6
