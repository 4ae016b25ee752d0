"""Initial values that are written before the model has memory are named, and those that are drawn again are not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import nn

from megalight.strategies import MegatronStrategy
from tests.strategies.toy import ToyModule
from tests.support.environment import trainer
from tests.support.workers import run


class Zero(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.normal_(self.bias)


class Written(ToyModule):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        nn.init.zeros_(model.layers["1"].weight)  # type: ignore[index]
        nn.init.uniform_(model.layers["1"].bias)  # type: ignore[index]
        return model


class Later(ToyModule):
    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        self.model.head.weight.data.requires_grad_(False)
        self.model.head.bias.requires_grad_(False).fill_(1.0)


class Again(ToyModule):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.layers["1"] = Zero(8, 8)  # type: ignore[index, operator]
        model.layers["2"].requires_grad_(True)  # type: ignore[index]
        return model


def _said(module: Any) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megalight.strategies.lost_values")
    logger.addHandler(handler)
    try:
        trainer(MegatronStrategy(), max_steps=1, limit_val_batches=0, use_distributed_sampler=False).fit(module())
    finally:
        logger.removeHandler(handler)
    return said


@pytest.mark.parametrize(
    ("module", "names"),
    [(Written, "model.layers.1.weight and 1 more while"), (Later, "model.head.bias while"), (Again, None)],
)
def test_values_that_are_lost_are_named_on_rank_0(module: Any, names: str | None) -> None:
    first, second = run(_said, 2, module)
    assert second == []
    assert len(first) == (names is not None)
    assert all(f"{module.__name__} wrote initial values to {names}" in text for text in first)
    assert all("reset_parameters. Write them there" in text for text in first)
