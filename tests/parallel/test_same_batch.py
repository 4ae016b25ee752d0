"""All ranks that hold one model together read the same batches, or are told that they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megalight.parallel.coupling import checksum
from megalight.strategies import MegatronStrategy
from megalight.types import TokenBatch
from tests.strategies.toy import ToyModule
from tests.support.environment import trainer
from tests.support.workers import run


class Rows(Dataset[dict[str, Tensor]]):
    """Rows by index; ``noise``: and a random draw."""

    def __init__(self, noise: bool) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.full((5,), float(index), dtype=torch.float64)
        noise = torch.rand(5, dtype=torch.float64) if self.noise else torch.zeros(5, dtype=torch.float64)
        return {"x": x / 16 + noise, "y": x[:3] / 16}


class Reading(ToyModule):
    def __init__(self, noise: bool) -> None:
        super().__init__()
        self.noise = noise
        self.seen: list[float] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(self.noise), batch_size=4, shuffle=True)

    def on_train_start(self) -> None:
        self.seen.append(self.trainer.train_dataloader.generator.initial_seed())  # workers draw from it

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += batch["x"].flatten().tolist()


def _read(options: dict[str, Any], noise: bool, own_sampler: bool) -> list[float]:
    strategy = MegatronStrategy(micro_batch_size=2, **options)
    module = Reading(noise)
    trainer(strategy, use_distributed_sampler=not own_sampler, limit_val_batches=0, max_steps=2).fit(module)
    return module.seen


PP = {"pipeline_parallel": 2}


@pytest.mark.parametrize("own_sampler", [True, False])
def test_stages_read_the_same(own_sampler: bool) -> None:
    first, second = run(_read, 2, PP, False, own_sampler)
    assert first == second
    assert len(set(first)) == 1 + 2 * 4


def test_replicas_do_not() -> None:
    first, second, third, fourth = run(_read, 4, PP, False, True)
    assert first == third
    assert second == fourth
    assert first != second


def test_different_batches_are_refused_on_all_ranks() -> None:
    """Draws of the process itself come from the generator that dropout uses, which differs between stages."""
    with pytest.raises(AssertionError, match=r"DataError: ranks 0, 1 hold one model together.*different batches"):
        run(_read, 2, PP, True, True)
    run(_read, 2, {}, True, True)


def test_a_checksum_sees_every_value() -> None:
    tokens = torch.arange(6).view(2, 3)
    batch = TokenBatch(tokens, tokens, torch.ones(2, 3))
    nested = {"a": [batch, (1, "text")], "b": torch.tensor(2.0, dtype=torch.bfloat16), "c": object()}
    assert checksum(nested) == checksum({**nested, "c": object()})
    changed = TokenBatch(tokens, tokens + 1, torch.ones(2, 3))
    others = [
        {**nested, "a": [changed, (1, "text")]},
        {**nested, "a": [batch, (2, "text")]},
        {**nested, "a": [batch, (1, "texts")]},
        {**nested, "b": torch.tensor(3.0, dtype=torch.bfloat16)},
        {**nested, "b": torch.tensor([2.0], dtype=torch.bfloat16)},
    ]
    assert len({checksum(value) for value in [nested, *others]}) == 6
    # NumPy's strides of arrays without an element are 0, and so are those of one that was expanded.
    nothing = torch.from_numpy(np.zeros(0, np.int64))
    assert checksum(nothing) == checksum(torch.zeros(0, dtype=torch.int64)) != checksum(torch.zeros(0, 3))
    assert checksum(tokens.new_ones(()).expand(1)) == checksum(tokens.new_ones(1))
