"""Attributes of modules that change between steps: no recording repeats an old value."""

from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from megalight.callbacks import CUDAGraph
from megalight.models.module import Carry
from megalight.parallel.graphs.fingerprint import REMEMBERED, AttributeWatcher
from megalight.strategies import MegatronStrategy
from megalight.types import Loss
from tests.callbacks.test_cuda_graph import NEVER, Quiet
from tests.parallel.graphs.tape import Tape
from tests.support.environment import trainer
from tests.support.workers import run

STEPS = 12


class Layer(nn.Linear):
    """Its factor is a number on the host, or none."""

    factor: float | None

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.factor = 1.0
        self.calls = 0
        self.evaluated = 0
        self.name = "a"

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.evaluated += not self.training
        x = super().forward(x)
        return x if self.factor is None else x * self.factor


class Numbered(Quiet):
    """Numbers of the host in a layer and in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.layers["1"] = Layer()
        return model

    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        loss = super().loss_step(carry, batch)
        return Loss(loss.sum * self.weight, loss.aux_losses)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Changes(pl.Callback):
    """Sets attributes before given steps."""

    def __init__(self, when: dict[int, dict[str, Any]]) -> None:
        self.when = when

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        for name, value in self.when.get(trainer.global_step, {}).items():
            owner = pl_module if name == "weight" else pl_module.model.layers["1"]
            setattr(owner, name, value)


def train(scope: Any, warmup: int, when: dict[int, dict[str, Any]], max_graphs: int | None = None) -> Any:
    callback = CUDAGraph(scope, warmup_steps=warmup, max_graphs=max_graphs)
    callback.recorder = Tape()
    module = Numbered()
    options: dict[str, Any] = {"max_epochs": 99, "max_steps": STEPS, "limit_val_batches": 1}
    options |= {"check_val_every_n_epoch": 1, "use_distributed_sampler": False}
    trainer(MegatronStrategy(micro_batch_size=2), callbacks=[callback, Changes(when)], **options).fit(module)
    steps = callback.replays // (1 if scope == "iteration" else 3 * 4)
    return steps, "; ".join(callback.reasons), [p.tolist() for p in module.model.parameters()]


_eager: dict[str, Any] = {}


def eager(when: dict[int, dict[str, Any]]) -> Any:
    """The parameters after a run without graphs, which is the same whatever the scope of others is."""
    key = repr(when)
    if key not in _eager:
        _eager[key] = run(train, 1, "iteration", NEVER, when)[0][2]
    return _eager[key]


def compared(scope: Any, when: dict[int, dict[str, Any]], max_graphs: int | None = None) -> tuple[int, str]:
    replays, reasons, found = run(train, 1, scope, 2, when, max_graphs)[0]
    torch.testing.assert_close(found, eager(when), rtol=1e-12, atol=1e-12)
    return replays, reasons


@pytest.mark.parametrize("scope", ["iteration", "layer"])
@pytest.mark.parametrize(
    "change",
    [
        {"factor": 0.5},
        {"factor": None},
        pytest.param({"factor": 3}, marks=pytest.mark.full),
        pytest.param({"name": "b"}, marks=pytest.mark.full),
        {"mask": True},
    ],
    ids=str,
)
def test_a_change_between_steps_is_recorded_anew(scope: str, change: dict[str, Any]) -> None:
    replays, reasons = compared(scope, {6: change})
    assert reasons == ""
    # Whole steps warm up anew, and layers are recorded at once.
    assert replays == (STEPS - 2 - 2 if scope == "iteration" else STEPS - 2)


def test_a_number_of_the_loss_counts_too() -> None:
    assert compared("iteration", {6: {"weight": 2.0}}) == (STEPS - 2 - 2, "")


def test_a_value_that_comes_back_finds_its_graph() -> None:
    turns = {6: {"factor": 0.5}, 9: {"factor": 1.0}, 10: {"factor": 0.5}, 11: {"factor": 1.0}}
    assert compared("iteration", turns) == (STEPS - 2 - 2, "")


@pytest.mark.parametrize(("scope", "max_graphs"), [("iteration", 1), ("layer", None)])
def test_a_change_at_every_step_is_refused_by_name(scope: str, max_graphs: int | None) -> None:
    schedule = {step: {"factor": 1.0 / step} for step in range(4, STEPS)}
    replays, reasons = compared(scope, schedule, max_graphs)
    assert replays < STEPS - 2
    assert re.search(r"other code changes (layers\.)?layers?\.1\.factor between steps.*keep what", reasons), reasons


def test_what_changes_inside_is_left_out() -> None:
    layer = Layer()
    attributes = AttributeWatcher([("a", layer)])
    before = attributes()
    with attributes.running():
        layer(torch.ones(8))
    assert attributes() == before, "it is no longer compared"
    layer.calls += 1
    assert attributes() == before
    layer.factor = 2.0
    assert attributes() != before
    assert attributes.changed == {"a.factor": 1}
    with attributes.running():
        pass
    layer.extra = layer.weight.detach()
    attributes()
    layer.extra = None  # type: ignore[assignment]
    attributes()
    assert attributes.changed == {"a.factor": 1, "a.extra": 2}


def test_the_state_that_was_not_used_for_longest_is_forgotten() -> None:
    layer = Layer()
    attributes = AttributeWatcher([("layer", layer)])
    usual = attributes()
    for step in range(3 * REMEMBERED):
        layer.factor = float(step + 2)
        attributes()
        layer.factor = 1.0
        assert attributes() == usual
