"""Validation, test and prediction: the same true means on every rank, alone and after fit."""

from __future__ import annotations

import functools
import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from megalight.models.gpt.model import GPT
from megalight.nn.init import initialize
from megalight.parallel.model_plans import plan_for
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Row
from megalight.parallel.tensor.overlap.spec import TensorOptions
from megalight.strategies import MegatronStrategy
from megalight.types import Loss, TokenBatch
from tests.strategies.training import ADAM, CONFIGS, SEED, WithData, global_batch, loader
from tests.support.environment import trainer
from tests.support.workers import run

LAYOUTS = [
    (1, {}),
    (2, {"tensor_parallel": 2, "sequence_parallel": True, "micro_batch_size": 1}),
    pytest.param((2, {}), marks=pytest.mark.full),
]


class Counting(WithData):
    """A GPTModule that also counts its samples' even tokens."""

    def loss_step(self, carry: Any, batch: TokenBatch) -> Loss:
        loss = super().loss_step(carry, batch)
        even = (batch.tokens % 2 == 0).sum()
        return Loss(loss.sum, metrics={"even": (even, torch.tensor(batch.tokens.numel()))})

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()


@functools.cache
def expected() -> tuple[float, float, list[torch.Tensor]]:
    """Over the two validation batches: sum(losses) / sum(tokens), the share of even tokens, each token's loss."""
    model = GPT(CONFIGS["gqa"]).double()
    initialize(model, SEED, "model.")
    total, tokens, even, rows = 0.0, 0.0, 0.0, []
    for step in range(2):
        batch = global_batch(step)
        with torch.no_grad():
            output = model(batch.tokens.reshape(-1), batch.sequences, labels=batch.labels.reshape(-1))
        losses = output.losses.view_as(batch.tokens) * batch.loss_mask
        total, tokens = total + float(losses.sum()), tokens + float(batch.loss_mask.sum())
        even += float((batch.tokens % 2 == 0).double().mean()) / 2
        rows.append(losses)
    return total / tokens, even, rows


def evaluator(options: dict[str, Any]) -> pl.Trainer:
    return trainer(MegatronStrategy(**options), use_distributed_sampler=False)


def _alone(options: dict[str, Any]) -> dict[str, Any]:
    module = Counting(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    runner = evaluator(options)
    validated = runner.validate(module, verbose=False)
    model = module.model
    tested = runner.test(module, verbose=False)
    predicted = runner.predict(module)
    assert module.model is model
    return {"val": validated[0], "test": tested[0], "predicted": [rows.tolist() for rows in predicted]}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_evaluation_alone(layout: tuple[int, dict[str, Any]]) -> None:
    ranks, options = layout
    loss, even, rows = expected()
    found = run(_alone, ranks, options)
    shares = 1 if options else ranks
    for rank, result in enumerate(found):
        assert result["val"] == pytest.approx({"val_loss": loss, "val_even": even}, rel=1e-9)
        assert result["test"] == pytest.approx({"test_loss": loss, "test_even": even}, rel=1e-9)
        for step, predicted in enumerate(result["predicted"]):
            share = rows[step].chunk(shares)[rank % shares]
            torch.testing.assert_close(torch.tensor(predicted, dtype=torch.float64), share, rtol=1e-9, atol=1e-12)


def _after_fit(options: dict[str, Any]) -> dict[str, Any]:
    module = Counting(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    first = trainer(MegatronStrategy(**options), use_distributed_sampler=False, num_sanity_val_steps=2)
    first.fit(module)
    during = float(first.callback_metrics["val_loss"])
    same = first.validate(module, verbose=False)[0]["val_loss"]
    tested = first.test(module, verbose=False)[0]["test_loss"]
    other = evaluator(options).validate(module, verbose=False)[0]["val_loss"]
    predicted = evaluator(options).predict(module)
    return {"losses": [during, same, tested, other], "predicted": len(predicted)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_evaluation_after_fit_goes_on_with_the_same_module(layout: tuple[int, dict[str, Any]]) -> None:
    ranks, options = layout
    found = run(_after_fit, ranks, options)
    losses = found[0]["losses"]
    assert losses[0] != pytest.approx(expected()[0], rel=1e-3)
    for rank in found:
        assert rank["losses"] == pytest.approx([losses[0]] * 4, rel=1e-12)
        assert rank["predicted"] == 2


def _several() -> dict[str, float]:
    module = Counting(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    strategy = MegatronStrategy()
    runner = trainer(strategy)

    def loaders() -> list[DataLoader[Any]]:
        return [loader(strategy, 1), loader(strategy, 2)]

    module.val_dataloader = loaders  # type: ignore[assignment,method-assign]
    runner.validate(module, verbose=False)
    return {name: float(value) for name, value in runner.callback_metrics.items()}


def test_several_loaders_are_kept_apart() -> None:
    metrics = run(_several, 1)[0]
    rows, batch = expected()[2], global_batch(0)
    assert metrics["val_loss/dataloader_idx_0"] == pytest.approx(float(rows[0].sum() / batch.loss_mask.sum()))
    assert metrics["val_loss/dataloader_idx_1"] == pytest.approx(expected()[0])


class Broken(Counting):
    def loss_step(self, carry: Any, batch: TokenBatch) -> Loss:
        return Loss(super().loss_step(carry, batch).sum * float("nan"))


def _broken() -> float:
    module = Broken(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    return float(trainer(MegatronStrategy()).validate(module, verbose=False)[0]["val_loss"])


def test_nan_is_reported() -> None:
    assert math.isnan(run(_broken, 1)[0])


def _other_layout(other: dict[str, Any]) -> str:
    module = Counting(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    trainer(MegatronStrategy(tensor_parallel=2)).validate(module, verbose=False)
    try:
        trainer(MegatronStrategy(**other)).validate(module, verbose=False)
    except ValueError as error:
        return str(error)
    return ""


def test_a_module_that_is_split_keeps_its_plan() -> None:
    other = ParallelizePlan({"layers.*.mlp.down": Row()})
    for message in run(_other_layout, 2, {"tensor_parallel": 2, "plan": other}):
        assert "GPT was split by another plan already than the one that is asked for now. Leave plan out" in message
    for message in run(_other_layout, 2, {"tensor_parallel": 2, "plan": plan_for(GPT(CONFIGS["gqa"]))}):
        assert not message


def test_a_module_that_is_split_keeps_its_layout() -> None:
    pieces = {"tensor_parallel": 2, "tensor": TensorOptions(pieces=2)}
    for other, name in (({}, "2 ranks: dp2"), (pieces, "2 ranks: tp2, TensorOptions(")):
        for message in run(_other_layout, 2, other):
            assert f"was split already (2 ranks: tp2) and cannot become another ({name}" in message
            assert "Make a new module" in message
