"""Collectives that users call inside of steps which only some ranks run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.models.module import Carry
from megalight.strategies import MegatronStrategy
from megalight.types import Loss
from tests.strategies.toy import ToyModule
from tests.support.environment import trainer
from tests.support.workers import run

CALLS = ("all_gather", "barrier", "broadcast", "reduce_boolean_decision")


class Asks(ToyModule):
    """Calls every collective in its steps, and one between them."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, set[str]] = {"forward_step": set(), "loss_step": set()}
        self.reduced: set[float] = set()

    def forward_step(self, model: nn.Module, batch: dict[str, Tensor], carry: Carry | None = None) -> Carry:
        self._ask("forward_step")
        return super().forward_step(model, batch, carry)

    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        self._ask("loss_step")
        return super().loss_step(carry, batch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.strategy.barrier()

    def _ask(self, step: str) -> None:
        strategy: Any = self.trainer.strategy
        given = {"all_gather": torch.ones(1), "broadcast": 1, "reduce_boolean_decision": True}
        for name in CALLS:
            with pytest.raises(ConfigurationError, match="waits for all ranks, and with pp=2 only some of them run"):
                getattr(strategy, name)(*[given[name]] if name in given else [])
            self.refused[step].add(name)
        self.reduced.add(float(strategy.reduce(torch.tensor(float(strategy.mesh.rank("dp"))))))


def _asked() -> tuple[dict[str, set[str]], set[float]]:
    module = Asks()
    strategy = MegatronStrategy(micro_batch_size=1, pipeline_parallel=2)
    trainer(strategy, max_steps=1, use_distributed_sampler=False, limit_val_batches=1).fit(module)
    return module.refused, module.reduced


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_collectives_of_all_ranks_are_refused_where_only_some_run(world: int) -> None:
    for rank, (refused, reduced) in enumerate(run(_asked, world)):
        last = rank >= world // 2
        assert refused == {"forward_step": set(CALLS), "loss_step": set(CALLS) if last else set()}
        assert reduced == {0.0 if world == 2 else 0.5}  # over the replicas
