"""Every layout trains the same model as one device: initial weights, losses, gradient norms, final weights."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from megalight.models.gpt import GPT, GPTConfig
from megalight.types import TokenBatch
from tests.strategies.training import CONFIGS, assert_same_run, by_hand, fit, global_batch
from tests.support.cover import pairwise
from tests.support.workers import run

COVER = [("gpt2", 1, False, 1, "no_shard")]
"""The table of layouts has all pairs of the others (:mod:`tests.support.test_cover`)."""
ROWS = pairwise(
    row
    for row in itertools.product(CONFIGS, (1, 2, 4), (False, True), (1, 2), ("no_shard", "optim"))
    if row[1] > 1 or not row[2]
)


@functools.cache
def expected(name: str) -> dict[str, Any]:
    return by_hand(CONFIGS[name])


def ident(row: tuple[Any, ...]) -> str:
    name, tp, sp, dp, level = row
    return f"{name}-tp{tp}{'sp' if sp else ''}-dp{dp}-{level}"


def check(name: str, tp: int, sp: bool, dp: int, level: str) -> None:
    layout = {"tensor_parallel": tp, "sequence_parallel": sp, "micro_batch_size": 1}
    found = run(_rank, tp * dp, name, layout, {"level": level}, timeout=240)
    for rank in found:
        assert rank["losses"] == found[0]["losses"], "ranks report different losses"
    assert_same_run(found[0], expected(name))


def _rank(name: str, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return fit(CONFIGS[name], options=options, **strategy)


@pytest.mark.parametrize("row", COVER, ids=ident)
def test_layout_trains_the_same_model(row: tuple[Any, ...]) -> None:
    check(*row)


@pytest.mark.parametrize(
    "row",
    [("gqa", 2, True, 2, "optim"), pytest.param(("tied", 4, False, 1, "no_shard"), marks=pytest.mark.full)],
    ids=ident,
)
def test_float32_differs_by_rounding_alone(row: tuple[Any, ...]) -> None:
    name, tp, sp, dp, level = row
    layout = {"tensor_parallel": tp, "sequence_parallel": sp, "micro_batch_size": 1}
    single = {"trainer_options": {"precision": "32-true"}}
    found = run(_rank, tp * dp, name, {**layout, **single}, {"level": level}, timeout=240)[0]
    reference = by_hand(CONFIGS[name], dtype=torch.float32)
    np.testing.assert_allclose(found["losses"], reference["losses"], rtol=1e-5)
    np.testing.assert_allclose(found["norms"], reference["norms"], rtol=1e-5)
    for key, value in reference["initial"].items():
        assert np.array_equal(found["initial"][key], value), f"initial {key} differs"


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in ROWS if row not in COVER], ids=ident)
def test_every_layout_trains_the_same_model(row: tuple[Any, ...]) -> None:
    check(*row)


def frozen_in(step: int, name: str) -> bool:
    """Layer 1 (on the second stage of two) and the embedding, which may be tied, are not trained in step 1."""
    return step == 1 and ("layers.1." in name or "embed" in name)


class Freeze(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        specs = trainer.strategy.parallel_model.specs  # type: ignore[attr-defined]
        for name, parameter in pl_module.model.named_parameters():  # type: ignore[union-attr]
            parameter.requires_grad_(not frozen_in(trainer.global_step, specs[name].pieces[0].name))


@functools.cache
def frozen_by_hand(name: str) -> dict[str, Any]:
    models: list[GPT] = []

    def build(config: GPTConfig) -> GPT:
        models.append(GPT(config))
        return models[-1]

    def batches(step: int) -> TokenBatch:
        for key, parameter in models[0].named_parameters():
            parameter.requires_grad_(not frozen_in(step, key))
        return global_batch(step)

    return by_hand(CONFIGS[name], 4, build=build, batches=batches)


def _frozen(name: str, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return fit(CONFIGS[name], 4, options, extra_callbacks=[Freeze()], **strategy)


@pytest.mark.parametrize(
    ("name", "ranks", "strategy", "options"),
    [
        ("gqa", 1, {}, {}),
        ("tied", 2, {"pipeline_parallel": 2}, {}),
        pytest.param(
            "tied",
            2,
            {"tensor_parallel": 2, "sequence_parallel": True},
            {"find_unused_parameters": True},
            marks=pytest.mark.full,
        ),
        ("gqa", 2, {}, {"level": "optim_grads_params"}),
        pytest.param(
            "gqa",
            4,
            {"pipeline_parallel": 2},
            {"level": "optim_grads", "find_unused_parameters": True},
            marks=pytest.mark.full,
        ),
    ],
)
def test_layers_frozen_for_a_step_stay_as_in_torch(
    name: str, ranks: int, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    for rank in run(_frozen, ranks, name, {"micro_batch_size": 1, **strategy}, options):
        assert_same_run(rank, frozen_by_hand(name))
